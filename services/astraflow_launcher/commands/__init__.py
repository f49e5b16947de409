"""Subcommands of `astraflow` that belong to the launcher; each module exposes a typer `app`."""
