"""Who may use a folder: one process at a time, from its start to its end.

Invariant: the lock is the kernel's (`flock` on a file in the folder), so it ends with the process that took it, however
that ends; programs that it starts and processes that it forks never have it. The file says who holds it, for people.
The launcher, trainers and nodes take one before they write anything.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from astraflow.errors import ConflictError, InvalidArgumentError
from astraflow_kit.log import without_secrets

_NAME = "lock"
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
_MAX_COMMAND = 200
_held: set[int] = set()


@dataclass(frozen=True)
class _Holder:
    """Content of the lock's file."""

    pid: int
    command: str
    started: str
    host: str


class FolderLock:
    """A folder that this process holds. A context manager: leaving it lets the folder go."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        _held.add(descriptor)

    def release(self) -> None:
        """Let the folder go; the end of the process does the same. Idempotent."""
        if self._descriptor in _held:
            _held.remove(self._descriptor)
            os.close(self._descriptor)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def lock_folder(folder: Path, *, remedy: str) -> FolderLock:
    """Take the folder, which is made when it is missing, or refuse at once.

    Raises ConflictError that names the process which holds it and ends with `remedy`, InvalidArgumentError where the
    file system has no locks, OSError where the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _NAME
    # Close-on-exec is Python's default; what is forked without exec closes it below.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _describe(os.read(descriptor, 4096))
        os.close(descriptor)
        raise ConflictError(f"{folder} is in use by {holder}; {remedy}") from None
    except OSError as error:
        os.close(descriptor)
        if error.errno not in _NO_LOCKS:
            raise
        raise InvalidArgumentError(
            f"{folder} is on a file system without locks ({error.strerror}): two processes could use it at once and "
            "destroy each other's data; choose a folder on another one, or mount it with locks (NFS: not `nolock`)"
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(asdict(_myself())).encode() + b"\n", 0)
    return FolderLock(descriptor)


def _myself() -> _Holder:
    command = without_secrets(" ".join(sys.argv))
    return _Holder(
        pid=os.getpid(),
        command=command[:_MAX_COMMAND],
        started=datetime.now(tz=UTC).isoformat(timespec="seconds"),
        host=socket.gethostname(),
    )


def _describe(content: bytes) -> str:
    with suppress(ValueError, TypeError):
        holder = _Holder(**json.loads(content))
        elsewhere = "" if holder.host == socket.gethostname() else f" on {holder.host}"
        return f"process {holder.pid}{elsewhere} (`{holder.command}`, since {holder.started})"
    return "a process that has only just started"


def _close_in_child() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)
