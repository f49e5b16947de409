"""The object store as the weight path sees it, and the one place that opens one.

Invariant: a key, once created, never changes: only `put_if_absent` writes anything that matters, and
`store.probing` refuses a store that would overwrite. Writer, log and mirror call the `ObjectStore` protocol; adapters
live in `store.file` and `store.s3`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from astraflow_weights.errors import StoreRefused
from astraflow_weights.settings import StoreSettings


class PutResult(Enum):
    """What a create-only PUT found."""

    CREATED = "created"
    EXISTS = "exists"


@dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """What is known of an object without reading it."""

    key: str
    size_bytes: int


class ObjectStore(Protocol):
    """Keys to immutable bytes. Thread-safe; every call blocks, is bounded in time and may be repeated.

    Every method may raise Unavailable (a passing fault outlasted the retries) and StoreRefused (credentials,
    bucket or folder are wrong), and ValueError for a key that `layout.check_key` refuses.
    """

    @property
    def uri(self) -> str:
        """Root of the store, for messages; carries no secret."""

    def put_if_absent(self, key: str, data: bytes) -> PutResult:
        """Create the object, whole and durable, or leave the existing one alone.

        Of any number of concurrent calls exactly one answers CREATED. A caller whose earlier call ended in
        Unavailable must compare the content on EXISTS: it may be its own. Large content whose sha256 is in the
        last segment of its key may answer CREATED to several: they wrote the same bytes.
        """

    def put(self, key: str, data: bytes) -> None:
        """Write or overwrite atomically. For hints only."""

    def get(self, key: str) -> bytes:
        """The whole object. Raises ObjectNotFound."""

    def get_range(self, key: str, *, start: int, length: int) -> bytes:
        """Bytes [start, start + length), cut at the end of the object. Raises ObjectNotFound."""

    def head(self, key: str) -> ObjectInfo:
        """Size of the object. Raises ObjectNotFound."""

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Objects whose key begins with `prefix` and sorts after `after`, in order of their keys."""

    def delete(self, key: str) -> None:
        """Remove the object; a missing one is success."""


def open_store(uri: str, *, settings: StoreSettings | None = None, known: Path | None = None) -> ObjectStore:
    """Open `file:///path` or `s3://bucket/prefix`. Makes no bucket, a folder at the first PUT; sends no request.

    `known` is a file in which whoever writes remembers a folder between processes, so that none makes it again.
    Raises StoreRefused for an address that cannot be understood.
    """
    # The adapters are imported when asked for: boto3 is slow to import and not installed everywhere.
    address = urlsplit(uri)
    if address.scheme == "file" and address.path and address.netloc in ("", "localhost"):
        from astraflow_weights.store.file import FileStore

        return FileStore.at_uri(uri, known=known)
    if address.scheme == "s3" and address.netloc:
        from astraflow_weights.store.s3 import S3Store

        return S3Store(
            bucket=address.netloc, prefix=address.path.strip("/"), settings=settings or StoreSettings()
        )
    raise StoreRefused(f"store address {uri!r} is not understood; use file:///path or s3://bucket/prefix")
