"""Reading many objects at a time.

Invariant: what is returned for a reference has the reference's length and sha256, whatever the store sent.
The log and the mirror call it.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from astraflow_weights.codec.digest import sha256
from astraflow_weights.errors import CorruptPart, ObjectNotFound
from astraflow_weights.store import ObjectStore
from astraflow_weights.versions.manifest import PartRef

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
