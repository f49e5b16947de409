"""What a signal does to a measurement that has to clean up behind itself. Called by those that start processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, with KeyboardInterrupt, so that everything is removed."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
