"""Subcommands of `astraflow` that look at a run, or operate it, through the contract of the dataflow server.

Each module exposes a typer `app` and needs nothing but the public package; `cli` names them.
"""
