"""Reading many objects at a time, and entries of the log wherever they can be had.

Invariant: what is returned for a reference has the reference's length and sha256, whatever the store sent; an entry is
sealed and in its own place. The log and the mirror call it.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from google.protobuf.message import DecodeError

from astraflow.weights.v1 import manifest_pb2
from astraflow_weights.codec.digest import sha256
from astraflow_weights.errors import CorruptManifest, CorruptPart, ObjectNotFound
from astraflow_weights.store import ObjectStore
from astraflow_weights.store.layout import PolicyKeys
from astraflow_weights.versions.manifest import Entry, ManifestEntry, PartRef, decode_entry
from astraflow_weights.versions.references.digest_table import KeyRef

# Wrong bytes are mostly the network's fault, so ask once more before the object itself is blamed.
_ATTEMPTS = 2
# Bounds what is read ahead of the consumer.
_CHUNK = 128


def fetch_objects(store: ObjectStore, keys: Sequence[str], *, threads: int) -> Iterator[bytes | None]:
    """Contents in the order of `keys`, None for what is not there, at most `threads` requests at a time. Raises as the
    store does.
    """
    read = partial(fetch_if_there, store)
    if len(keys) <= 1:
        yield from map(read, keys)
        return
    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="weights-fetch") as pool:
        for first in range(0, len(keys), _CHUNK):
            yield from pool.map(read, keys[first : first + _CHUNK])


def fetch_if_there(store: ObjectStore, key: str) -> bytes | None:
    """The object, None when there is none. Raises as the store does."""
    try:
        return store.get(key)
    except ObjectNotFound:
        return None


def fetch_part(store: ObjectStore, ref: PartRef) -> bytes:
    """The referenced object. Raises CorruptPart when it is missing or has other content, and as the store
    does.
    """
    for _ in range(_ATTEMPTS):
        try:
            data = store.get(ref.key)
        except ObjectNotFound as error:
            raise CorruptPart(f"{ref.key!r} is missing from {store.uri}") from error
        if len(data) == ref.size_bytes and sha256(data) == ref.sha256:
            return data
    raise CorruptPart(
        f"{ref.key!r} in {store.uri} ({len(data)} bytes) does not have the sha256 of its reference"
    )


class EntryReader:
    """Finds entries of one policy's log: asks again, as for parts, then looks where copies may be."""

    def __init__(self, store: ObjectStore, keys: PolicyKeys) -> None:
        self._store = store
        self._keys = keys
        self.rescued: dict[int, bytes] = {}
        """Entries of which a copy is worth having: only the hint holds them, or manifests after them refer to them."""
        self._key: tuple[int, bytes] | None = None

    def find(
        self, sequence: int, data: bytes | None, *, digest: bytes = b"", attempts: int = _ATTEMPTS
    ) -> tuple[Entry | None, bytes, str]:
        """An entry of which `data` was read, the bytes that verify, and what is wrong when none do.

        With `digest` only bytes of that sha256 do. Raises IncompatibleError, and as the store does.
        """
        copy, hint = partial(self._stored, self._keys.copy(sequence)), partial(self._hint, sequence)
        again = [partial(self._stored, self._keys.entry(sequence))] * (attempts - 1)
        sources: list[Callable[[], bytes | None]] = [lambda: data, *again, copy, hint]
        problem = ""
        for source in sources:
            found = source()
            entry, complaint = self.read(found, sequence, digest=digest)
            if entry is not None and found is not None:
                if source is hint:
                    self.rescued[sequence] = found
                return entry, found, ""
            problem = problem or complaint
        return None, b"", problem

    def note(self, entry: Entry, data: bytes) -> None:
        """Remember a key manifest, for once another one refers to it more than one version hangs on it."""
        if not isinstance(entry, ManifestEntry):
            return
        if entry.table.key is None:
            self._key = entry.sequence, data
        elif self._key is not None and self._key[0] == entry.table.key.sequence:
            sequence, content = self._key
            self.rescued[sequence] = content
            self._key = None

    def referred(self, key: KeyRef) -> Entry:
        """The key manifest that another one refers to. Raises CorruptManifest, and as `find` does."""
        name = self._keys.entry(key.sequence)
        entry, _, problem = self.find(key.sequence, self._stored(name), digest=key.sha256)
        if entry is None:
            raise CorruptManifest(f"{name!r} is referred to: {problem}")
        return entry

    def read(self, data: bytes | None, sequence: int, *, digest: bytes = b"") -> tuple[Entry | None, str]:
        """The entry in the bytes, or what is wrong with them. Raises IncompatibleError."""
        if data is None:
            return None, "it is gone; entries must never be deleted"
        try:
            entry = decode_entry(data)
        except CorruptManifest as error:
            return None, error.message
        here = self._keys.run_id, self._keys.policy_id
        if (entry.run_id, entry.policy_id, entry.sequence) != (*here, sequence):
            return None, (
                f"log entry {sequence} of {'/'.join(here)} says it is entry {entry.sequence} of "
                f"{entry.run_id}/{entry.policy_id}; objects were copied or renamed"
            )
        if digest and sha256(data) != digest:
            return None, "it was changed after it was created; entries must never change"
        return entry, ""

    def _stored(self, key: str) -> bytes | None:
        return fetch_if_there(self._store, key)

    def _hint(self, sequence: int) -> bytes | None:
        """The entry that `latest` holds a copy of, if it is this one."""
        try:
            hint = manifest_pb2.LatestHint.FromString(self._stored(self._keys.latest) or b"")
        except DecodeError:
            return None
        return hint.entry if hint.sequence == sequence and hint.entry else None
