"""AstraFlow's public package: contracts, client, plug-in Protocols, recipe schema and command line.

It imports neither torch nor redis, and this module imports nothing at all, so that `astraflow --help` stays
instant. Everything a recipe or a foreign program may rely on lives under this root; the daemons live in
`astraflow_*` packages.
"""

__version__ = "0.3.0"
