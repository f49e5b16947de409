"""The folder of `--write`: made before anything is measured, so that a measurement of half an hour is never lost."""

from __future__ import annotations

from pathlib import Path

import typer


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
