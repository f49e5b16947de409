"""Collectors are told of parts that are coming, from before the first until they are named or given up."""

from pathlib import Path

import pytest

from astraflow_weights.codec.tensors import Array
from astraflow_weights.errors import CorruptManifest, Unavailable
from astraflow_weights.publish.version_writer import CommittedVersion
from astraflow_weights.versions.intents import INTENT_S, RENEW_S, UploadIntents, find_intents
from astraflow_weights.versions.tombstones import Tombstones
from support.manual_clock import ManualClock
from support.published_models import ModelPublisher, bury, open_writer, read_log
from support.weight_models import KEYS, FaultyStore, lost, make_model, overwrite, trained

MODEL = make_model()


class World:
    """A publisher whose PUTs are noted with how many intents are in the store then, and fail on request."""

    def __init__(self, store: FaultyStore) -> None:
        self.store = store
        self.clock = ManualClock()
        self.publisher = ModelPublisher(open_writer(store, clock=self.clock))
        self.intents_at: dict[str, int] = {}
        self.lost_answers = ""
        self.uploads_take_long = False
        store.before_put = self.note

    def note(self, key: str, _: bytes) -> None:
        """A key that begins with `lost_answers` is not stored and gets no answer."""
        self.intents_at[key] = len(self.intents())
        if self.lost_answers and key.startswith(self.lost_answers):
            lost(key)
        if self.uploads_take_long and key.startswith(KEYS.parts):
            self.clock.now_s += RENEW_S + 1

    def publish(self, model: dict[str, Array] = MODEL, *, step: int = 0) -> CommittedVersion:
        return self.publisher.publish(model, step=step)

    def intents(self) -> list[str]:
        """Keys of the intents that are in the store."""
        return [info.key for info in self.store.list(KEYS.intents)]

    def noted(self, prefix: str) -> list[int]:
        """Intents at the PUTs below a prefix."""
        return [count for key, count in self.intents_at.items() if key.startswith(prefix)]


@pytest.fixture
def world(store: FaultyStore) -> World:
    return World(store)


def test_a_publication_is_announced_before_its_first_part_and_until_its_manifest(world: World) -> None:
    world.publish()
    assert set(world.noted(KEYS.parts)) == {1}
    assert set(world.noted(KEYS.entries)) == {1}
    assert world.intents() == []


def test_what_was_published_before_announces_nothing(world: World) -> None:
    world.publish()
    world.intents_at.clear()
    world.publish()
    assert world.intents_at == {}


@pytest.mark.parametrize(("lost_answers", "left"), [(KEYS.parts, 0), (KEYS.entries, 1)])
def test_an_intent_stays_while_its_commit_may_be_done(world: World, lost_answers: str, left: int) -> None:
    world.lost_answers = lost_answers
    with pytest.raises(Unavailable):
        world.publish()
    assert len(world.intents()) == left
    world.lost_answers = ""
    world.publish()
    assert world.intents() == []


def test_a_commit_after_a_long_upload_renews_the_intent_first(world: World) -> None:
    world.uploads_take_long = True
    world.publish()
    assert len(world.noted(KEYS.intents)) == 2
    assert world.intents() == []


def test_a_commit_after_a_long_upload_refuses_names_that_were_given_up_meanwhile(world: World) -> None:
    world.publish()
    world.uploads_take_long = True

    def bury_everything_at_the_renewal(key: str, data: bytes) -> None:
        world.note(key, data)
        if key.startswith(KEYS.intents) and world.intents():
            names = [Path(info.key).stem for info in world.store.list(KEYS.parts)]
            bury(world.store, 0, *map(bytes.fromhex, names))

    world.store.before_put = bury_everything_at_the_renewal
    after = trained(MODEL, 1)
    with pytest.raises(Unavailable, match="publish again"):
        world.publish(after, step=1)
    world.uploads_take_long = False
    assert world.publish(after, step=1).version == 1
    tombstones = Tombstones(world.store, keys=KEYS)
    tombstones.refresh()
    named = {part.sha256 for delta in read_log(world.store).record(1).deltas for part in delta.parts}
    assert tombstones.names.isdisjoint(named)


def test_intents_of_a_fenced_writer_and_intents_of_yesterday_are_over(world: World) -> None:
    for epoch in (1, 2):
        UploadIntents(world.store, keys=KEYS, clock=world.clock).open(epoch=epoch)
    for passed_s, live, over in ((0, 1, 1), (INTENT_S + 1, 0, 2)):
        found = find_intents(world.store, keys=KEYS, epoch=2, now_s=world.clock.wall_time_s() + passed_s)
        assert (len(found.live), len(found.over)) == (live, over)


def test_a_damaged_intent_stops_collection_and_says_what_to_do(world: World) -> None:
    UploadIntents(world.store, keys=KEYS, clock=world.clock).open(epoch=1)
    (key,) = world.intents()
    overwrite(world.store, key, b"rotten")
    with pytest.raises(CorruptManifest, match="delete it when no trainer"):
        find_intents(world.store, keys=KEYS, epoch=1, now_s=world.clock.wall_time_s())
