"""Who may do what to a mirror's folder at the same time, among all processes of the machine.

Invariant: an engine loads under the shared lock and only what is CLEAN; files that engines load are changed under the
exclusive lock only; one process at a time advances the folder. Locks end with their process. `mirror` and whoever
loads call it.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from astraflow_weights.errors import MirrorBusy
from astraflow_weights.mirror.state import MirrorFiles

_POLL_S = 0.01


@dataclass(frozen=True, kw_only=True)
class Hold:
    """A version that stays as it is until `release`. `written_by` names the state that said so."""

    version: int
    directory: Path
    written_by: str
    descriptor: int

    def release(self) -> None:
        """Let it change again."""
        os.close(self.descriptor)


def try_hold(root: Path) -> Hold | None:
    """Hold the version in a mirror's folder; None when there is none or it is being changed."""
    files = MirrorFiles(root)
    descriptor = _try_lock(root / "lock", fcntl.LOCK_SH)
    if descriptor is None:
        return None
    state = files.read_state()
    if state is None or state.held is None or state.applying is not None or not state.whole:
        os.close(descriptor)
        return None
    return Hold(
        version=state.held.version,
        directory=files.checkpoint,
        written_by=state.written_by,
        descriptor=descriptor,
    )


@contextmanager
def exclusive(root: Path, *, patience_s: float) -> Iterator[None]:
    """Wait until nobody loads, and let nobody begin. Raises MirrorBusy."""
    deadline_s = time.monotonic() + patience_s
    while (descriptor := _try_lock(root / "lock", fcntl.LOCK_EX)) is None:
        if time.monotonic() > deadline_s:
            raise MirrorBusy(
                f"an engine has been loading from {root} for {patience_s:.0f} s; end it, or raise lock_patience_s"
            )
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def pulling(root: Path) -> Iterator[None]:
    """Be the one that advances the folder. Raises MirrorBusy at once when another process does."""
    descriptor = _try_lock(root / "puller", fcntl.LOCK_EX)
    if descriptor is None:
        raise MirrorBusy(f"another process advances {root}; one puller per folder")
    try:
        yield
    finally:
        os.close(descriptor)


def _try_lock(path: Path, kind: int) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
