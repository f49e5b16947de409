"""Options that the benchmarks share: `--json`, and the folder of `--write`.

The folder is made before anything is measured, so that a measurement of half an hour is never lost.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object; docs/bench.md.")]


def made(folder: Path | None) -> Path | None:
    """Callback of `--write`. Raises BadParameter when no file can be written there."""
    if folder is not None:
        probe = folder / ".writable"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise typer.BadParameter(f"{folder} cannot be written to: {error.strerror}") from error
    return folder


WriteFolder = Annotated[
    Path | None,
    typer.Option(
        "--write", metavar="FOLDER", callback=made, help="Also write the page of results and its JSON there."
    ),
]
