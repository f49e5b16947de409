"""Follows what a log entry refers to: the policy's schema, and the manifest that has the digests of what stayed equal.

Invariant: what is returned had the sha256 by which it was referred to, and the manifest's tensors make its root. The
schema and the last key manifest are kept, so whoever follows a log fetches each of them once. The log calls it.
"""

from astraflow_weights.codec.digest import sha256
from astraflow_weights.codec.schema import Schema
from astraflow_weights.errors import CorruptManifest, ObjectNotFound
from astraflow_weights.store import ObjectStore
from astraflow_weights.store.layout import PolicyKeys
from astraflow_weights.versions.fetch import EntryReader
from astraflow_weights.versions.manifest import Manifest, ManifestEntry, resolved
from astraflow_weights.versions.references.digest_table import KeyRef

# Wrong bytes are mostly the network's fault, so ask once more before the object itself is blamed.
_ATTEMPTS = 2


class References:
    """Of one policy. One owner per object: not thread-safe."""

    def __init__(self, store: ObjectStore, *, keys: PolicyKeys, entries: EntryReader) -> None:
        """Sends no request."""
        self._entries = entries
        self._store = store
        self._keys = keys
        self._schemas: dict[bytes, Schema] = {}
        self._key: tuple[bytes, tuple[bytes, ...]] | None = None

    def follow(self, entry: ManifestEntry) -> Manifest:
        """The whole manifest. Raises CorruptManifest when something it refers to is gone or damaged, and as the store
        does.
        """
        schema = self._schema(entry.schema_sha256)
        key = entry.table.key
        return resolved(entry, schema=schema, key_digests=None if key is None else self._digests(key))

    def _schema(self, digest: bytes) -> Schema:
        if digest not in self._schemas:
            data = self._object(self._keys.schema(digest.hex()), digest)
            try:
                self._schemas[digest] = Schema.decode(data)
            except ValueError as error:
                raise CorruptManifest(f"schema {digest.hex()} is none: {error}") from error
        return self._schemas[digest]

    def _digests(self, key: KeyRef) -> tuple[bytes, ...]:
        if self._key is None or self._key[0] != key.sha256:
            entry = self._entries.referred(key)
            if not isinstance(entry, ManifestEntry) or entry.table.key is not None:
                raise CorruptManifest(f"log entry {key.sequence} is referred to and has not all digests")
            self._key = key.sha256, entry.table.digests
        return self._key[1]

    def _object(self, name: str, digest: bytes) -> bytes:
        for _ in range(_ATTEMPTS):
            try:
                data = self._store.get(name)
            except ObjectNotFound as error:
                raise CorruptManifest(f"{name!r} is gone; it must never be deleted") from error
            if sha256(data) == digest:
                return data
        raise CorruptManifest(f"{name!r} was changed after it was created, or is damaged")
