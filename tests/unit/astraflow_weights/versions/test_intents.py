"""Collectors are told of parts that are coming, from before the first until they are named or given up."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from astraflow_weights.errors import CorruptManifest, Unavailable
from astraflow_weights.publish.version_writer import VersionWriter
from astraflow_weights.store import ObjectStore, PutResult
from astraflow_weights.store.file import FileStore
from astraflow_weights.store.layout import PolicyKeys
from astraflow_weights.versions.collection_records import Tombstone, encode_tombstone
from astraflow_weights.versions.intents import INTENT_S, RENEW_S, UploadIntents, find_intents
from astraflow_weights.versions.tombstones import Tombstones
from support.manual_clock import ManualClock
from support.published_models import ModelPublisher, open_writer, read_log
from support.weight_models import POLICY, RUN, make_model, overwrite, trained

KEYS = PolicyKeys(RUN, POLICY)
MODEL = make_model()


class WatchedStore(FileStore):
    """Notes at each PUT of a part or an entry how many intents are in the store, and fails on request."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.intents_at: dict[str, int] = {}
        self.lost_answers = ""
        self.advance_at_parts: ManualClock | None = None

    def put_if_absent(self, key: str, data: bytes) -> PutResult:
        """Note, then create; a key that begins with `lost_answers` is not stored and gets no answer."""
        self.intents_at[key] = len(intents(self))
        if self.lost_answers and key.startswith(self.lost_answers):
            raise Unavailable("no answer")
        if self.advance_at_parts is not None and key.startswith(KEYS.parts):
            self.advance_at_parts.now_s += RENEW_S + 1
        return super().put_if_absent(key, data)


@pytest.fixture
def store(tmp_path: Path) -> WatchedStore:
    """An empty store."""
    return WatchedStore(tmp_path)


@pytest.fixture
def clock() -> ManualClock:
    """The writers' and collectors' time."""
    return ManualClock()


def opened(store: ObjectStore, clock: ManualClock, *, epoch: int = 1) -> VersionWriter:
    """The writer of an epoch."""
    return open_writer(store, epoch=epoch, clock=clock)


def intents(store: ObjectStore) -> list[str]:
    """Keys of the intents that are in the store."""
    return [info.key for info in store.list(KEYS.intents)]


def under(prefix: str, noted: dict[str, int]) -> Iterator[int]:
    """Intents at the PUTs below a prefix."""
    return (count for key, count in noted.items() if key.startswith(prefix))


def test_a_publication_is_announced_before_its_first_part_and_until_its_manifest(
    store: WatchedStore, clock: ManualClock
) -> None:
    publisher = ModelPublisher(opened(store, clock))
    store.intents_at.clear()
    publisher.publish(MODEL, step=0)
    assert set(under(KEYS.parts, store.intents_at)) == {1}
    assert set(under(KEYS.entries, store.intents_at)) == {1}
    assert intents(store) == []


def test_what_was_published_before_announces_nothing(store: WatchedStore, clock: ManualClock) -> None:
    publisher = ModelPublisher(opened(store, clock))
    publisher.publish(MODEL, step=0)
    store.intents_at.clear()
    publisher.publish(MODEL, step=0)
    assert store.intents_at == {}


def test_a_publication_that_fails_before_its_commit_ends_its_intent(
    store: WatchedStore, clock: ManualClock
) -> None:
    publisher = ModelPublisher(opened(store, clock))
    store.lost_answers = KEYS.parts
    with pytest.raises(Unavailable):
        publisher.publish(MODEL, step=0)
    assert intents(store) == []


def test_while_it_is_open_whether_a_manifest_was_created_the_intent_stays_until_the_next_commit(
    store: WatchedStore, clock: ManualClock
) -> None:
    publisher = ModelPublisher(opened(store, clock))
    store.lost_answers = KEYS.entries
    with pytest.raises(Unavailable):
        publisher.publish(MODEL, step=0)
    assert len(intents(store)) == 1
    store.lost_answers = ""
    publisher.publish(MODEL, step=0)
    assert intents(store) == []


def test_a_commit_after_a_long_upload_renews_the_intent_first(
    store: WatchedStore, clock: ManualClock
) -> None:
    publisher = ModelPublisher(opened(store, clock))
    store.advance_at_parts = clock
    store.intents_at.clear()
    publisher.publish(MODEL, step=0)
    assert len(list(under(KEYS.intents, store.intents_at))) == 2
    assert intents(store) == []


def test_a_commit_after_a_long_upload_refuses_names_that_were_given_up_meanwhile(
    store: WatchedStore, clock: ManualClock
) -> None:
    publisher = ModelPublisher(opened(store, clock))
    publisher.publish(MODEL, step=0)
    publish_with_a_tombstone_at_the_renewal(store, clock, publisher)
    with pytest.raises(Unavailable, match="publish again"):
        publisher.publish(trained(MODEL, 1), step=1)
    store.advance_at_parts = None
    committed = publisher.publish(trained(MODEL, 1), step=1)
    assert committed.version == 1
    tombstones = Tombstones(store, keys=KEYS)
    tombstones.refresh()
    log = read_log(store)
    named = {part.sha256 for delta in log.record(1).deltas for part in delta.parts}
    assert tombstones.names.isdisjoint(named)


def publish_with_a_tombstone_at_the_renewal(
    store: WatchedStore, clock: ManualClock, publisher: ModelPublisher
) -> None:
    """Arrange that every part in the store is in a tombstone once the upload has taken long."""
    store.advance_at_parts = clock
    original = store.put_if_absent

    def put(key: str, data: bytes) -> PutResult:
        if key.startswith(KEYS.intents) and any(info for info in store.list(KEYS.intents)):
            names = frozenset(
                bytes.fromhex(info.key.removeprefix(KEYS.parts).removesuffix(".afwd"))
                for info in store.list(KEYS.parts)
            )
            tombstone = Tombstone(number=0, parts=names, created_time_s=0)
            original(KEYS.tombstone(0), encode_tombstone(KEYS, tombstone))
        return original(key, data)

    store.put_if_absent = put  # type: ignore[method-assign]
    assert publisher.newest is not None


def test_intents_of_a_fenced_writer_and_intents_of_yesterday_are_over(
    store: WatchedStore, clock: ManualClock
) -> None:
    old, live = (UploadIntents(store, keys=KEYS, clock=clock) for _ in range(2))
    old.open(epoch=1)
    live.open(epoch=2)
    found = find_intents(store, keys=KEYS, epoch=2, now_s=clock.wall_time_s())
    assert (len(found.live), len(found.over)) == (1, 1)
    found = find_intents(store, keys=KEYS, epoch=2, now_s=clock.wall_time_s() + INTENT_S + 1)
    assert (len(found.live), len(found.over)) == (0, 2)


def test_a_damaged_intent_stops_collection_and_says_what_to_do(
    store: WatchedStore, clock: ManualClock
) -> None:
    UploadIntents(store, keys=KEYS, clock=clock).open(epoch=1)
    (key,) = intents(store)
    overwrite(store, key, b"rotten")
    with pytest.raises(CorruptManifest, match="delete it when no trainer"):
        find_intents(store, keys=KEYS, epoch=1, now_s=clock.wall_time_s())
