"""A folder whose files have the names of modules that our processes import, as somebody's project may."""

from pathlib import Path

HOSTILE_STATUS = 77
_NAMES = (
    "asyncio",
    "grpc",
    "h2",
    "httpx",
    "json",
    "pydantic",
    "signal",
    "sitecustomize",
    "structlog",
    "torch",
)


def hostile_folder(folder: Path) -> None:
    """Whoever imports one of them ends with `HOSTILE_STATUS`."""
    for name in _NAMES:
        (folder / f"{name}.py").write_text(f"import os\nos._exit({HOSTILE_STATUS})\n")
