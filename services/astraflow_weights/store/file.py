"""An object store in a folder, for one machine or a shared file system with hard links.

Invariant: a key appears whole or not at all, and a create-only PUT is decided by `link(2)`, which the
kernel makes atomic; content and folder are synced before the answer. A store that was used once is never made again:
its folder holds an identity, and where that is missing or another one, nothing is written and nothing is believed to be
absent. Opened by `store.open_store`.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from astraflow_weights.durable import replace_synced, sync_folder, write_synced
from astraflow_weights.errors import (
    ObjectNotFound,
    StoreFull,
    StoreMissing,
    StoreReadOnly,
    StoreRefused,
    Unavailable,
)
from astraflow_weights.store import ObjectInfo, PutResult
from astraflow_weights.store.layout import check_key

_SCRATCH, _IDENTITY = ".scratch", ".identity"
_IDENTITY_BYTES = 16
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV)
_LINKS_REMEDY = "use a file system with hard links, or an s3:// store"
_FOLDER_REMEDY = "check the folder's owner, mode, free space and mount"
# Of a store that has worked these pass: a mount came back read-only, an owner is being changed.
_PASSING = (errno.EACCES, errno.EPERM, errno.EROFS)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EOPNOTSUPP, errno.ENOTDIR, errno.EXDEV)

T = TypeVar("T")


class FileStore:
    """`ObjectStore` over a folder; see there for the contract."""

    def __init__(self, root: Path, *, known: Path | None = None) -> None:
        """Touches nothing. The first PUT makes the folder; until then it is a store without objects.

        `known` is a file that remembers the store between processes: with it, only the first of them makes the folder.
        """
        self._root = root.absolute()
        self._scratch = self._root / _SCRATCH
        self._known = known
        self._identity = known.read_bytes() if known is not None and known.is_file() else b""
        """Of the store that was used before; empty until one was."""

    @classmethod
    def at_uri(cls, uri: str, *, known: Path | None = None) -> "FileStore":
        """Open the folder of a `file:///path` address."""
        return cls(Path(unquote(urlsplit(uri).path)), known=known)

    @property
    def uri(self) -> str:
        return self._root.as_uri()

    def put_if_absent(self, key: str, data: bytes) -> PutResult:
        self._make_root(key)
        return self._guard(lambda: self._link(self._path(key), data), key=key)

    def put(self, key: str, data: bytes) -> None:
        self._make_root(key)
        self._guard(lambda: self._replace(self._path(key), data), key=key)

    def get(self, key: str) -> bytes:
        return self._guard(self._path(key).read_bytes, key=key)

    def get_range(self, key: str, *, start: int, length: int) -> bytes:
        return self._guard(lambda: _read_range(self._path(key), start=start, length=length), key=key)

    def head(self, key: str) -> ObjectInfo:
        status = self._guard(self._path(key).stat, key=key)
        if not stat.S_ISREG(status.st_mode):
            raise ObjectNotFound(f"{self.uri} has a folder, not an object, at {key!r}")
        return ObjectInfo(key=key, size_bytes=status.st_size)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        keys = self._guard(lambda: _keys(self._root, prefix), key=prefix)
        if not keys:
            self._is_there()
        for key in keys:
            if key > after:
                # Deleted since the folder was read: as if it had been deleted before.
                with contextlib.suppress(ObjectNotFound):
                    yield self.head(key)

    def delete(self, key: str) -> None:
        self._guard(lambda: self._path(key).unlink(missing_ok=True), key=key)

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _link(self, path: Path, data: bytes) -> PutResult:
        if path.exists():
            return PutResult.EXISTS
        # First what needs the folder of the store: one that has just been unmounted must not be made by the next line.
        scratch = self._write_scratch(data)
        try:
            self._make_folder(path.parent)
            os.link(scratch, path)
        except FileExistsError:
            return PutResult.EXISTS
        finally:
            scratch.unlink()
        sync_folder(path.parent)
        return PutResult.CREATED

    def _replace(self, path: Path, data: bytes) -> None:
        scratch = self._write_scratch(data)
        self._make_folder(path.parent)
        scratch.replace(path)
        sync_folder(path.parent)

    def _write_scratch(self, data: bytes) -> Path:
        scratch = self._scratch / secrets.token_hex(16)
        write_synced(scratch, data)
        return scratch

    def _is_there(self) -> bool:
        """Whether this store was made; the first sight of it is remembered. Raises StoreMissing when it was and is
        not what is there now.
        """
        # Read first: another thread may make the store, and remember it, once this one has found none.
        expected = self._identity
        try:
            found = (self._root / _IDENTITY).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            found = b""
        except OSError as error:
            raise self._translated(error, key=_IDENTITY) from error
        if found and not expected:
            if self._known is not None:
                # Stores of other threads and processes see it for the first time, too.
                replace_synced(self._known, found, writer=f".{secrets.token_hex(8)}")
            self._identity = expected = found
        if found != expected:
            instead = "another store is there" if found else "there is no store"
            anew = f", or delete {self._known} to begin a new one" if self._known is not None else ""
            raise StoreMissing(
                f"{self.uri}: store {expected.decode(errors='replace')} was here and now {instead}: it is not "
                f"mounted, or was moved or deleted; bring it back{anew}"
            )
        return bool(found)

    def _make_root(self, key: str) -> None:
        """Make the store unless it was made before. Raises StoreRefused when that is not possible, StoreMissing."""
        if self._is_there():
            return
        try:
            self._scratch.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreRefused(
                f"{self.uri}: the folder cannot be made: {error.strerror or error}; {_FOLDER_REMEDY}"
            ) from error
        identity = secrets.token_hex(_IDENTITY_BYTES).encode()
        # What is done first in a store that nobody remembers yet makes it known.
        self._guard(lambda: self._link(self._root / _IDENTITY, identity), key=key)

    def _make_folder(self, folder: Path) -> None:
        if folder == self._root or folder.is_dir():
            return
        self._make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)

    def _guard(self, operation: Callable[[], T], *, key: str) -> T:
        try:
            done = operation()
            if not self._identity:
                self._is_there()
            return done
        except (FileNotFoundError, IsADirectoryError) as error:
            self._is_there()
            raise ObjectNotFound(f"{self.uri} has no object {key!r}") from error
        except OSError as error:
            raise self._translated(error, key=key) from error

    def _translated(self, error: OSError, *, key: str) -> StoreRefused | Unavailable:
        remedy = _LINKS_REMEDY if error.errno in _NO_LINKS else _FOLDER_REMEDY
        return self._kind_of(error)(f"{self.uri}: {error.strerror or error} at {key!r}; {remedy}")

    def _kind_of(self, error: OSError) -> type[StoreRefused | Unavailable]:
        if self._identity and error.errno in _PASSING:
            return StoreReadOnly
        if error.errno in _FULL:
            return StoreFull
        return StoreRefused if error.errno in _REFUSED else Unavailable


def _keys(root: Path, prefix: str) -> list[str]:
    folder = root / prefix.rpartition("/")[0]
    paths = (Path(parent) / name for parent, _, names in os.walk(folder) for name in names)
    keys = (path.relative_to(root).as_posix() for path in paths)
    return sorted(
        key for key in keys if key.startswith(prefix) and not key.startswith((f"{_SCRATCH}/", _IDENTITY))
    )


def _read_range(path: Path, *, start: int, length: int) -> bytes:
    if start < 0 or length < 0:
        raise ValueError(f"range start {start} and length {length} must not be negative")
    with path.open("rb") as file:
        file.seek(start)
        return file.read(length)
