"""`astraflow secrets`: the secrets of one installation on one box, made where they are missing."""

from pathlib import Path
from typing import Annotated

import typer

from astraflow_launcher.issuing.first_start import make_missing

app = typer.Typer(add_completion=False)


@app.command()
def secrets(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with one folder for each party.")],
    names: Annotated[
        list[str],
        typer.Option("--name", metavar="HOST", help="Name that callers use for a server; repeat it."),
    ],
) -> None:
    """Make the secrets of one installation that are missing or end within 60 days; leaves the others as they are.

    An authority, certificates, keys, a token for each role, passwords. Nothing secret is printed.
    """
    made = list(make_missing(folder, names=names))
    for each in made:
        typer.echo(f"made {each}")
    if not made:
        typer.echo("all secrets are there")
