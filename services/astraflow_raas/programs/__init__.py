"""How is a generated program run and judged, in two sandboxes that share nothing but calls and values?"""
