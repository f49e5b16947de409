"""Failpoints armed for a block of a test, in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from astraflow_kit import failpoints


@contextmanager
def armed(spec: str, *, log_path: Path | None = None) -> Iterator[None]:
    """While the block runs, what `spec` says happens; hits are written to `log_path`."""
    failpoints.arm(spec, log_path=log_path)
    try:
        yield
    finally:
        failpoints.arm("")
