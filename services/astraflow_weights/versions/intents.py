"""Upload intents: how a writer tells collectors that parts are coming which nothing names yet.

Invariant: from before the first PUT of a part until what names it is visible, or can no longer become visible,
an intent of the writer is in the store. A collector sweeps a round only when every intent that it saw after
its tombstone has ended; a writer reads the tombstones after its intent. So of the two one always sees the
other. The version writer and the compactor own one each; collectors ask `find_intents`.
"""

import secrets
from dataclasses import dataclass

from astraflow.errors import IncompatibleError
from astraflow_kit.clock import Clock
from astraflow_kit.log import get_logger
from astraflow_weights.errors import CorruptManifest, ObjectNotFound, StoreRefused, Unavailable
from astraflow_weights.store import ObjectStore
from astraflow_weights.store.layout import PolicyKeys
from astraflow_weights.versions.collection_records import UploadIntent, decode_intent, encode_intent
from astraflow_weights.versions.manifest import NONCE_BYTES

log = get_logger(__name__)

INTENT_S = 3600.0
"""An intent older than this is over: its writer renews long before, so its process is gone."""
RENEW_S = INTENT_S / 4
"""Age from which a writer renews its intent before it commits."""


class UploadIntents:
    """The intents of one writer, one open at a time. Not thread-safe."""

    def __init__(self, store: ObjectStore, *, keys: PolicyKeys, clock: Clock) -> None:
        self._store = store
        self._keys = keys
        self._clock = clock
        self._current = ""
        self._opened_s = 0.0
        self._undecided = False
        self._left: list[str] = []

    def open(self, *, epoch: int) -> None:
        """Announce uploads under the log's epoch. Read the tombstones after it. Raises as the store does."""
        self._leave()
        intent = UploadIntent(
            epoch=epoch, nonce=secrets.token_bytes(NONCE_BYTES), created_time_s=self._clock.wall_time_s()
        )
        key = self._keys.intent(epoch, intent.nonce)
        self._opened_s = self._clock.monotonic_s()
        # Perhaps it is stored although the answer is an error.
        self._current, self._undecided = key, False
        self._store.put_if_absent(key, encode_intent(self._keys, intent))

    @property
    def aged(self) -> bool:
        """Whether the open intent must be renewed before anything is committed under it."""
        return bool(self._current) and self._clock.monotonic_s() - self._opened_s > RENEW_S

    def commit_begins(self) -> None:
        """What names the parts is about to be created: a failure from now on leaves open whether it was."""
        self._undecided = True

    def commit_ended(self) -> None:
        """An entry of this writer is in the log: nothing that it tried before can come after it."""
        self._undecided = False
        left, self._left = self._left, []
        for key in left:
            self._delete(key)

    def close(self) -> None:
        """End the open intent, unless it is undecided what came of it: then it ends with the next commit, fence
        or hour.
        """
        if self._current and not self._undecided:
            self._delete(self._current)
            self._current = ""
        self._leave()

    def _leave(self) -> None:
        if self._current:
            self._left.append(self._current)
        self._current, self._undecided = "", False

    def _delete(self, key: str) -> None:
        """What cannot be deleted now is tried again after the next commit; nobody is refused for it."""
        try:
            self._store.delete(key)
        except (StoreRefused, Unavailable) as error:
            log.warning("upload_intent.not_deleted", key=key, message=str(error))
            self._left.append(key)


@dataclass(frozen=True, kw_only=True)
class FoundIntents:
    """Keys of the intents in the store: those that protect parts, and those that are over but not deleted."""

    live: frozenset[str]
    over: frozenset[str]


def find_intents(store: ObjectStore, *, keys: PolicyKeys, epoch: int, now_s: float) -> FoundIntents:
    """Sort the intents by the log's newest epoch and a clock: one is over when its epoch is lower, or when it is
    older than an hour.

    Raises CorruptManifest for a damaged one: nobody knows whom it protects.
    """
    live: set[str] = set()
    over: set[str] = set()
    for info in store.list(keys.intents):
        intent = _read(store, keys, info.key)
        if intent is not None:
            alive = intent.epoch >= epoch and now_s - intent.created_time_s <= INTENT_S
            (live if alive else over).add(info.key)
    return FoundIntents(live=frozenset(live), over=frozenset(over))


def _read(store: ObjectStore, keys: PolicyKeys, key: str) -> UploadIntent | None:
    try:
        return decode_intent(keys, store.get(key))
    except ObjectNotFound:
        # Ended since it was listed.
        return None
    except (CorruptManifest, IncompatibleError) as error:
        raise CorruptManifest(
            f"upload intent {key!r} cannot be read, so nothing is collected: {error}; delete it when no trainer "
            "of this policy runs"
        ) from error
