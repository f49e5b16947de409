"""Files that are read again when they change, as rotated keys, revoked tokens and certificates are.

Invariant: what was usable once stays in force until something usable replaces it: a rotation that went wrong is
logged and locks nobody out. Used by `verifier` and `certificates`.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from astraflow.errors import AstraflowError
from astraflow_kit.log import get_logger
from astraflow_kit.settings import SettingsError

log = get_logger(__name__)

LOOK_EVERY_S = 0.5
Value = TypeVar("Value")
Stamp = tuple[tuple[int, int, int], ...]


class WatchedFiles(Generic[Value]):
    """What `parse` makes of the content of `paths`; safe to ask from any thread."""

    def __init__(self, *paths: Path, parse: Callable[..., Value]) -> None:
        """Read now. Raises SettingsError when a file cannot be read, and what `parse` raises."""
        self._paths = paths
        self._parse = parse
        self._lock = threading.Lock()
        self._looked_s = time.monotonic()
        self._stamp = self._look()
        self._value = self._read()

    def current(self) -> Value:
        """The value of the files as they are now; looked at no more often than every `LOOK_EVERY_S`."""
        with self._lock:
            if time.monotonic() - self._looked_s >= LOOK_EVERY_S:
                self._looked_s = time.monotonic()
                self._read_if_changed()
            return self._value

    def _read_if_changed(self) -> None:
        stamp = self._look()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        names = [str(path) for path in self._paths]
        try:
            self._value = self._read()
        except AstraflowError as error:
            log.error(
                "identity.files_not_reloaded", files=names, message=error.message, in_force="what was before"
            )
        else:
            log.info("identity.files_reloaded", files=names)

    def _read(self) -> Value:
        return self._parse(*(read_file(path) for path in self._paths))

    def _look(self) -> Stamp:
        """Changes with every replacement, also of a link's target, which is how mounted secrets are rotated."""
        try:
            found = [path.stat() for path in self._paths]
        except OSError:
            return ()
        return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in found)


def read_file(path: Path) -> bytes:
    """The content of a file of settings. Raises SettingsError with the remedy."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(
            f"{path} cannot be read: {error.strerror}; mount it, or let this user read it"
        ) from error
