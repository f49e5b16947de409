"""An object store in a folder, for one machine or a shared file system with hard links.

Invariant: a key appears whole or not at all, and a create-only PUT is decided by `link(2)`, which the
kernel makes atomic; content and folder are synced before the answer. Opened by `store.open_store`.
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

from astraflow_weights.durable import sync_folder, write_synced
from astraflow_weights.errors import ObjectNotFound, StoreRefused, Unavailable
from astraflow_weights.store import ObjectInfo, PutResult
from astraflow_weights.store.layout import check_key

_SCRATCH = ".scratch"
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV)
_LINKS_REMEDY = "use a file system with hard links, or an s3:// store"
_FOLDER_REMEDY = "check the folder's owner, mode, free space and mount"
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EOPNOTSUPP, errno.ENOTDIR, errno.EXDEV)

T = TypeVar("T")


class FileStore:
    """`ObjectStore` over a folder; see there for the contract."""

    def __init__(self, root: Path) -> None:
        """Touches nothing. The first PUT makes the folder; until then it is a store without objects."""
        self._root = root.absolute()
        self._scratch = self._root / _SCRATCH

    @classmethod
    def at_uri(cls, uri: str) -> "FileStore":
        """Open the folder of a `file:///path` address."""
        return cls(Path(unquote(urlsplit(uri).path)))

    @property
    def uri(self) -> str:
        return self._root.as_uri()

    def put_if_absent(self, key: str, data: bytes) -> PutResult:
        self._make_root()
        return self._guard(lambda: self._link(self._path(key), data), key=key)

    def put(self, key: str, data: bytes) -> None:
        self._make_root()
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
        for key in self._guard(lambda: _keys(self._root, prefix), key=prefix):
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
        self._make_folder(path.parent)
        scratch = self._write_scratch(data)
        try:
            os.link(scratch, path)
        except FileExistsError:
            return PutResult.EXISTS
        finally:
            scratch.unlink()
        sync_folder(path.parent)
        return PutResult.CREATED

    def _replace(self, path: Path, data: bytes) -> None:
        self._make_folder(path.parent)
        self._write_scratch(data).replace(path)
        sync_folder(path.parent)

    def _write_scratch(self, data: bytes) -> Path:
        scratch = self._scratch / secrets.token_hex(16)
        write_synced(scratch, data)
        return scratch

    def _make_root(self) -> None:
        """Raises StoreRefused when that is not possible."""
        if self._scratch.is_dir():
            return
        try:
            self._scratch.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreRefused(
                f"{self.uri}: the folder cannot be made: {error.strerror or error}; {_FOLDER_REMEDY}"
            ) from error

    def _make_folder(self, folder: Path) -> None:
        if folder.is_dir():
            return
        self._make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)

    def _guard(self, operation: Callable[[], T], *, key: str) -> T:
        try:
            return operation()
        except (FileNotFoundError, IsADirectoryError) as error:
            raise ObjectNotFound(f"{self.uri} has no object {key!r}") from error
        except OSError as error:
            raise self._translated(error, key=key) from error

    def _translated(self, error: OSError, *, key: str) -> StoreRefused | Unavailable:
        remedy = _LINKS_REMEDY if error.errno in _NO_LINKS else _FOLDER_REMEDY
        kind = StoreRefused if error.errno in _REFUSED else Unavailable
        return kind(f"{self.uri}: {error.strerror or error} at {key!r}; {remedy}")


def _keys(root: Path, prefix: str) -> list[str]:
    folder = root / prefix.rpartition("/")[0]
    paths = (Path(parent) / name for parent, _, names in os.walk(folder) for name in names)
    keys = (path.relative_to(root).as_posix() for path in paths)
    return sorted(key for key in keys if key.startswith(prefix) and not key.startswith(f"{_SCRATCH}/"))


def _read_range(path: Path, *, start: int, length: int) -> bytes:
    if start < 0 or length < 0:
        raise ValueError(f"range start {start} and length {length} must not be negative")
    with path.open("rb") as file:
        file.seek(start)
        return file.read(length)
