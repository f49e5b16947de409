"""Collectors are told of parts that are coming, from before the first until they are named or given up."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from astraflow_weights.errors import CorruptManifest, Unavailable
from astraflow_weights.store import ObjectStore
from astraflow_weights.versions.intents import INTENT_S, RENEW_S, UploadIntents, find_intents
from astraflow_weights.versions.tombstones import Tombstones
from support.manual_clock import ManualClock
from support.published_models import ModelPublisher, bury, open_writer, read_log
from support.weight_models import KEYS, FaultyStore, lost, make_model, overwrite, trained

MODEL = make_model()


class WatchedStore(FaultyStore):
    """Notes at each PUT of a part or an entry how many intents are in the store, and fails on request."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.intents_at: dict[str, int] = {}
        self.lost_answers = ""
        self.advance_at_parts: ManualClock | None = None
        self.before_put = self.note

    def note(self, key: str, _: bytes) -> None:
        """A key that begins with `lost_answers` is not stored and gets no answer."""
        self.intents_at[key] = len(intents(self))
        if self.lost_answers and key.startswith(self.lost_answers):
            lost(key)
        if self.advance_at_parts is not None and key.startswith(KEYS.parts):
            self.advance_at_parts.now_s += RENEW_S + 1


@pytest.fixture
def store(tmp_path: Path) -> WatchedStore:
    """An empty store."""
    return WatchedStore(tmp_path)


@pytest.fixture
def publisher(store: WatchedStore, clock: ManualClock) -> ModelPublisher:
    """The first one, none of whose PUTs is noted."""
    publisher = ModelPublisher(open_writer(store, clock=clock))
    store.intents_at.clear()
    return publisher


@pytest.fixture
def clock() -> ManualClock:
    """The writers' and collectors' time."""
    return ManualClock()


def intents(store: ObjectStore) -> list[str]:
    """Keys of the intents that are in the store."""
    return [info.key for info in store.list(KEYS.intents)]


def under(prefix: str, noted: dict[str, int]) -> Iterator[int]:
    """Intents at the PUTs below a prefix."""
    return (count for key, count in noted.items() if key.startswith(prefix))


def test_a_publication_is_announced_before_its_first_part_and_until_its_manifest(
    store: WatchedStore, publisher: ModelPublisher
) -> None:
    publisher.publish(MODEL, step=0)
    assert set(under(KEYS.parts, store.intents_at)) == {1}
    assert set(under(KEYS.entries, store.intents_at)) == {1}
    assert intents(store) == []


def test_what_was_published_before_announces_nothing(store: WatchedStore, publisher: ModelPublisher) -> None:
    publisher.publish(MODEL, step=0)
    store.intents_at.clear()
    publisher.publish(MODEL, step=0)
    assert store.intents_at == {}


def test_a_publication_that_fails_before_its_commit_ends_its_intent(
    store: WatchedStore, publisher: ModelPublisher
) -> None:
    store.lost_answers = KEYS.parts
    with pytest.raises(Unavailable):
        publisher.publish(MODEL, step=0)
    assert intents(store) == []


def test_while_it_is_open_whether_a_manifest_was_created_the_intent_stays_until_the_next_commit(
    store: WatchedStore, publisher: ModelPublisher
) -> None:
    store.lost_answers = KEYS.entries
    with pytest.raises(Unavailable):
        publisher.publish(MODEL, step=0)
    assert len(intents(store)) == 1
    store.lost_answers = ""
    publisher.publish(MODEL, step=0)
    assert intents(store) == []


def test_a_commit_after_a_long_upload_renews_the_intent_first(
    store: WatchedStore, publisher: ModelPublisher, clock: ManualClock
) -> None:
    store.advance_at_parts = clock
    publisher.publish(MODEL, step=0)
    assert len(list(under(KEYS.intents, store.intents_at))) == 2
    assert intents(store) == []


def test_a_commit_after_a_long_upload_refuses_names_that_were_given_up_meanwhile(
    store: WatchedStore, publisher: ModelPublisher, clock: ManualClock
) -> None:
    publisher.publish(MODEL, step=0)
    bury_everything_at_the_renewal(store, clock)
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


def bury_everything_at_the_renewal(store: WatchedStore, clock: ManualClock) -> None:
    """Arrange that every part in the store is in a tombstone once the upload has taken long."""
    store.advance_at_parts = clock

    def note(key: str, data: bytes) -> None:
        store.note(key, data)
        if key.startswith(KEYS.intents) and intents(store):
            names = [info.key.removeprefix(KEYS.parts) for info in store.list(KEYS.parts)]
            bury(store, 0, *(bytes.fromhex(name.removesuffix(".afwd")) for name in names))

    store.before_put = note


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
