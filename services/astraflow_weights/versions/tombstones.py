"""The names of parts that rounds of collection may delete, as writers and pullers read them.

Invariant: after `refresh` every name is known that was in a tombstone before `refresh` was called. A tombstone
never changes, so each is read once. Uploads and pull leases own one each; not thread-safe.
"""

from astraflow.errors import IncompatibleError
from astraflow_kit.log import get_logger
from astraflow_weights.errors import CorruptManifest, ObjectNotFound
from astraflow_weights.store import ObjectStore
from astraflow_weights.store.layout import PolicyKeys
from astraflow_weights.versions.collection_records import decode_tombstone

log = get_logger(__name__)


class Tombstones:
    """Starts empty: call `refresh`."""

    def __init__(self, store: ObjectStore, *, keys: PolicyKeys) -> None:
        self._store = store
        self._keys = keys
        self._rounds: dict[str, frozenset[bytes] | None] = {}

    @property
    def names(self) -> frozenset[bytes]:
        """sha256 of every part in a tombstone that could be read."""
        return frozenset().union(*(names for names in self._rounds.values() if names is not None))

    @property
    def complete(self) -> bool:
        """False when a tombstone is damaged: then any name may be in it."""
        return None not in self._rounds.values()

    def refresh(self) -> None:
        """Read what is new and forget what was removed. Raises Unavailable, StoreRefused."""
        listed = [info.key for info in self._store.list(self._keys.tombstones)]
        self._rounds = {key: names for key, names in self._rounds.items() if key in set(listed)}
        for key in listed:
            if key not in self._rounds:
                self._read(key)

    def _read(self, key: str) -> None:
        try:
            self._rounds[key] = decode_tombstone(self._keys, self._store.get(key)).parts
        except ObjectNotFound:
            # Removed since it was listed: its round ended long ago.
            return
        except (CorruptManifest, IncompatibleError) as error:
            log.error("tombstone.unreadable", key=key, message=str(error))
            self._rounds[key] = None
