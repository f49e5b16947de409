"""The node as a whole: how it joins, is put together, drains, and where its files lie."""
