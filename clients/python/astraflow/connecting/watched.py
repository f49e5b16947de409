"""Files that are read again when they change, as rotated keys, tokens and certificates are.

Invariant: what was usable once stays in force until something usable replaces it: a rotation that went wrong is
logged and locks nobody out. Used by `connection`, and by servers for the files of theirs.
"""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from astraflow.errors import AstraflowError

log = logging.getLogger(__name__)

_SETTLED_S = 1.0
"""A file written later than this ago is read again even if it looks the same: it may be written twice within one tick
of its clock."""
Value = TypeVar("Value")
Stamp = tuple[tuple[int, int, int], ...]


class WatchedFiles(Generic[Value]):
    """What `parse` makes of the content of `paths`; safe to ask from any thread."""

    def __init__(
        self, *paths: Path, read: Callable[[Path], bytes] = Path.read_bytes, parse: Callable[..., Value]
    ) -> None:
        """Read now. Raises what `read` and `parse` raise."""
        self._paths = paths
        self._read, self._parse = read, parse
        self._lock = threading.Lock()
        self._problem = ""
        self._looked_s = time.monotonic()
        self._stamp = self._look()
        self._contents = self._read_all()
        self._value = parse(*self._contents)

    def look_every_s(self) -> float:
        """The files are looked at no more often than this."""
        return 0.0

    def current(self) -> Value:
        """The value of the files as they are now."""
        with self._lock:
            if time.monotonic() - self._looked_s >= self.look_every_s():
                self._looked_s = time.monotonic()
                self._read_if_changed()
            return self._value

    def _read_if_changed(self) -> None:
        stamp = self._look()
        settled_ns = time.time_ns() - int(_SETTLED_S * 1e9)
        if stamp == self._stamp and all(changed_ns < settled_ns for *_, changed_ns in stamp):
            return
        self._stamp = stamp
        try:
            contents = self._read_all()
            if contents != self._contents:
                self._value, self._contents = self._parse(*contents), contents
                self.report_reloaded([str(path) for path in self._paths])
            self._problem = ""
        except AstraflowError as error:
            if error.message != self._problem:
                self._problem = error.message
                self.report_problem([str(path) for path in self._paths], error)

    def report_reloaded(self, names: list[str]) -> None:
        """Log that the content of these files is in force."""
        log.info("read again, as they have changed: %s", ", ".join(names))

    def report_problem(self, names: list[str], error: AstraflowError) -> None:
        """Log that the files are not usable, and that what they were before stays in force."""
        log.error("what was before stays in force of %s: %s", ", ".join(names), error.message)

    def _read_all(self) -> tuple[bytes, ...]:
        return tuple(self._read(path) for path in self._paths)

    def _look(self) -> Stamp:
        """Changes with every replacement, also of a link's target, which is how mounted secrets are rotated."""
        try:
            found = [path.stat() for path in self._paths]
        except OSError:
            return ()
        return tuple((stat.st_ino, stat.st_size, stat.st_ctime_ns) for stat in found)
