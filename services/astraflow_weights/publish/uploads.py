"""Sends parts and assets of one policy to the store under their content's name, and offers paths that they make.

Invariant: an object that exists is never written again, and what `upload_parts` returns is stored under a name
that no collector may delete: a part whose name is in a tombstone is salted and stored under another one. That
holds between `UploadIntents.open`, which `read_tombstones` follows, and `close`. The version writer has one for
the committing process; every further process of a sharded trainer has its own and writes nothing else.
"""

import secrets
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path

from astraflow_kit import failpoints
from astraflow_kit.log import get_logger
from astraflow_weights.codec.digest import sha256
from astraflow_weights.codec.ordered import in_order
from astraflow_weights.codec.parts.writer import salted
from astraflow_weights.codec.schema import Schema
from astraflow_weights.errors import CorruptPart
from astraflow_weights.store import ObjectStore, PutResult
from astraflow_weights.store.layout import PolicyKeys, check_file_name
from astraflow_weights.versions.log import path_key
from astraflow_weights.versions.manifest import AddedPath, Asset, PartRef, encode_path
from astraflow_weights.versions.tombstones import Tombstones

log = get_logger(__name__)


class Uploads:
    """One owner per object: not thread-safe; every call blocks."""

    def __init__(self, store: ObjectStore, *, keys: PolicyKeys, threads: int) -> None:
        self._store = store
        self._keys = keys
        self._threads = threads
        self._tombstones = Tombstones(store, keys=keys)
        # Assets and schemas are never collected: what was sent once stays.
        self._sent: set[str] = set()

    def read_tombstones(self) -> frozenset[bytes]:
        """Learn which names may be collected; call after an upload intent is in the store, before the first part.

        Raises Unavailable, StoreRefused.
        """
        self._tombstones.refresh()
        return self._tombstones.names

    def upload_parts(self, parts: Iterable[bytes]) -> tuple[PartRef, ...]:
        """Send parts under their content's name, several at a time, as they come: while some are on their way the
        next are made. Idempotent. Raises as the store does.
        """
        return tuple(in_order(self._upload_part, parts, threads=self._threads, name="weights-upload"))

    def upload_schema(self, schema: Schema) -> None:
        """Send the schema, once. Raises as the store does."""
        self._upload_once(self._ref(schema.content, key_of=self._keys.schema), schema.content)

    def upload_assets(self, files: Iterable[Path]) -> tuple[Asset, ...]:
        """Send files under their content's name; content that was sent from here before is not sent again.

        Raises OSError for an unreadable file, ValueError for a name that cannot stand in a checkpoint.
        """
        assets = []
        for path in sorted(files, key=lambda path: path.name):
            data = path.read_bytes()
            ref = self._ref(data, key_of=self._keys.asset)
            self._upload_once(ref, data)
            assets.append(Asset(file_name=check_file_name(path.name), blob=ref))
        return tuple(assets)

    def _unburied(self, part: bytes) -> bytes:
        """The part, salted until no tombstone names it; always, where one cannot be read."""
        buried = self._tombstones.names
        salts = count(1) if self._tombstones.complete else count(1 + secrets.randbelow(2**31))
        found = part if self._tombstones.complete else salted(part, salt=next(salts))
        while sha256(found) in buried:
            found = salted(part, salt=next(salts))
        return found

    def _ref(self, data: bytes, *, key_of: Callable[[str], str]) -> PartRef:
        digest = sha256(data)
        return PartRef(key=key_of(digest.hex()), size_bytes=len(data), sha256=digest)

    def _upload_part(self, part: bytes) -> PartRef:
        data = self._unburied(part)
        ref = self._ref(data, key_of=self._keys.part)
        failpoints.hit("weights.publish.uploading")
        self._upload(ref, data)
        return ref

    def _upload_once(self, ref: PartRef, data: bytes) -> None:
        if ref.key not in self._sent:
            self._upload(ref, data)
            self._sent.add(ref.key)

    def _upload(self, ref: PartRef, data: bytes) -> None:
        if self._store.put_if_absent(ref.key, data) is PutResult.EXISTS:
            found = self._store.head(ref.key).size_bytes
            if found != ref.size_bytes:
                raise CorruptPart(
                    f"{ref.key!r} in {self._store.uri} has {found} bytes instead of {ref.size_bytes}; "
                    "delete the damaged object"
                )


def offer_path(store: ObjectStore, path: AddedPath) -> None:
    """Make a path visible whose parts are stored; of two makers the second finds it. Raises as the store does."""
    failpoints.hit("weights.compaction.parts_uploaded")
    store.put_if_absent(path_key(PolicyKeys(path.run_id, path.policy_id), path), encode_path(path))
    failpoints.hit("weights.compaction.visible")
    log.info(
        "compaction.added", version=path.version, base_version=path.base_version, size_bytes=path.size_bytes
    )
