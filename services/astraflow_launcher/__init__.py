"""`astraflow dev`: starts the three daemons, an embedded Redis and a store on one machine, watches them, and
ends them.

Nothing imports this package; it may import any other. It speaks to the daemons only through their public
contracts.
"""
