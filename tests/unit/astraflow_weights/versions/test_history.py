"""One rotten entry ends no policy: readers and writers go on beyond it, and whatever copy there is of it is used."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from astraflow_weights.collection.collector import Stage
from astraflow_weights.collection.retention import Roots
from astraflow_weights.errors import CorruptManifest, NoPath
from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.publish.log_keeping import keep_log
from astraflow_weights.publish.rollback import roll_back
from astraflow_weights.settings import PublishSettings
from astraflow_weights.store import PutResult
from astraflow_weights.versions.history import History
from astraflow_weights.versions.standing import Known, ServerStanding, compare
from support.log_records import fence, manifest
from support.manual_clock import ManualClock
from support.published_models import (
    GRACE_S,
    ModelPublisher,
    PublishedModels,
    new_collector,
    new_compactor,
    open_writer,
    pulled,
    read_log,
)
from support.weight_models import KEYS, POLICY, RUN, FaultyStore, flip, overwrite, same_model, trained

SETTINGS = PublishSettings(snapshot_every_versions=3, snapshot_chain_ratio=100)
LAST = 7
Damage = Callable[[FaultyStore, str], None]


def cut(store: FaultyStore, key: str) -> None:
    overwrite(store, key, store.get(key)[:-7])


def empty(store: FaultyStore, key: str) -> None:
    overwrite(store, key, b"")


def swap(store: FaultyStore, key: str) -> None:
    """Another entry, whose seal holds, in its place."""
    other = KEYS.entry(3 if key != KEYS.entry(3) else 4)
    overwrite(store, key, store.get(other))


DAMAGES: dict[str, Damage] = {
    "flipped": flip,
    "truncated": cut,
    "empty": empty,
    "of another place": swap,
    "deleted": FaultyStore.delete,
}


@pytest.fixture
def world(store: FaultyStore) -> PublishedModels:
    """A fence at entry 0 and version v at entry v + 1; every third version has a snapshot. The hint knows the last."""
    world = PublishedModels(store, settings=SETTINGS)
    world.publish_up_to(LAST)
    keep_log(store, read_log(store), every_entries=1000)
    return world


def sequence(version: int) -> int:
    """Its entry."""
    return version + 1


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("entry", [0, 3, 4])
def test_a_reader_reads_on_beyond_it(world: PublishedModels, damage: str, entry: int) -> None:
    DAMAGES[damage](world.store, KEYS.entry(entry))
    log = read_log(world.store)
    assert list(log.unreadable) == [KEYS.entry(entry)]
    assert [record.version for record in log.records] == list(range(LAST + 1))
    lost = [record.version for record in log.records if record.damage]
    assert lost == ([entry - 1] if entry else [])
    assert same_model(pulled(world.store, LAST), world.models[LAST])


def test_a_manifest_that_others_refer_to_is_read_from_its_copy(world: PublishedModels) -> None:
    flip(world.store, KEYS.entry(sequence(0)))
    assert not read_log(world.store).unreadable
    for version in (0, LAST):
        assert same_model(pulled(world.store, version), world.models[version])


def test_versions_behind_it_come_by_the_next_snapshot(world: PublishedModels) -> None:
    flip(world.store, KEYS.entry(sequence(4)))
    with pytest.raises(
        CorruptManifest, match=f"version 4 .* log entry '{KEYS.entry(5)}'.*put the object back"
    ):
        pulled(world.store, 4)
    with pytest.raises(NoPath):
        pulled(world.store, 5)
    assert same_model(pulled(world.store, 6), world.models[6])


def test_what_the_network_damaged_once_is_asked_for_again(world: PublishedModels, tmp_path: Path) -> None:
    class Damaging(FaultyStore):
        bad = KEYS.entry(sequence(3))

        def get(self, key: str) -> bytes:
            content = super().get(key)
            return content[:-1] if key == self.bad and self.gets.count(key) == 1 else content

    log = read_log(Damaging(tmp_path / "store"))
    assert (log.unreadable, len(log.records)) == ({}, LAST + 1)


def test_the_newest_entry_is_read_from_its_copy_which_stays_when_there_is_a_newer_one(
    world: PublishedModels,
) -> None:
    key = KEYS.entry(sequence(LAST))
    flip(world.store, key)
    rotten = world.store.get(key)
    assert same_model(pulled(world.store, LAST), world.models[LAST])
    new_compactor(world.store, kept=None).compact()
    world.publish()
    assert same_model(pulled(world.store, LAST), world.models[LAST])
    assert world.store.get(key) == rotten, "nobody writes over an entry"


def test_an_entry_that_is_put_back_counts_again_for_who_had_passed_it_over(world: PublishedModels) -> None:
    key = KEYS.entry(sequence(4))
    sound, before = world.store.get(key), read_log(world.store).record(4)
    flip(world.store, key)
    log = read_log(world.store)
    assert log.records[4].damage
    overwrite(world.store, key, sound)
    log.refresh()
    assert (log.unreadable, log.record(4)) == ({}, before)


def test_a_node_that_holds_the_version_needs_no_entry(world: PublishedModels, tmp_path: Path) -> None:
    mirror = Mirror(tmp_path / "mirror")
    world.advance(mirror, 4)
    flip(world.store, KEYS.entry(sequence(4)))
    log = read_log(world.store)
    restarted = Mirror(tmp_path / "mirror")
    restarted.lend_manifest(log)
    assert not log.unreadable
    assert restarted.advance(world.store, log, target=4).base_version == 4
    assert same_model(restarted.load(), world.models[4])
    restarted.advance(world.store, log, target=5)
    assert same_model(restarted.load(), world.models[5])


# ---------------------------------------------------------------- writers


def rot_newest(world: PublishedModels) -> bytes:
    """The newest entry cannot be read, and no copy is there; what it holds."""
    key = KEYS.entry(sequence(len(world.models) - 1))
    flip(world.store, key)
    world.store.delete(KEYS.latest)
    return world.store.get(key)


def test_a_writer_that_resumes_goes_on_beyond_it_under_the_next_numbers(world: PublishedModels) -> None:
    rotten = rot_newest(world)
    writer = open_writer(world.store, 2, settings=SETTINGS)
    assert writer.newest is not None
    assert writer.newest.version == LAST - 1
    publisher = ModelPublisher(writer, base=world.models[LAST - 1])
    again = publisher.publish(world.models[LAST], step=LAST)
    newer = trained(world.models[LAST], 99)
    committed = publisher.publish(newer, step=LAST + 1)
    assert (again.version, committed.version) == (LAST + 1, LAST + 2)
    assert world.store.get(KEYS.entry(sequence(LAST))) == rotten
    for version, model in ((LAST + 1, world.models[LAST]), (LAST + 2, newer)):
        assert same_model(pulled(world.store, version), model)
    known = [committed.version for committed in writer.committed_since(LAST - 2)]
    assert known == [LAST - 1, LAST + 1, LAST + 2]


def test_the_number_of_an_announced_version_that_cannot_be_read_is_no_contradiction(
    world: PublishedModels,
) -> None:
    rot_newest(world)
    server = ServerStanding(identity="", finished_step=LAST, version=LAST)
    assert compare(server, Known(versions=read_log(world.store).records)) is None


def test_an_entry_that_rots_under_a_writer_makes_it_encode_again(world: PublishedModels) -> None:
    """The commit's answer is lost, and what it created cannot be read: perhaps that is the version."""

    def rot(key: str, data: bytes) -> None:
        if key == KEYS.entry(sequence(LAST + 1)):
            world.store.put(key, data[:-1])

    world.store.before_put = rot
    with pytest.raises(Exception, match="publish again under the next number"):
        world.publish()
    committed = world.publisher.publish(world.models[-1], step=LAST + 1)
    assert committed.version == LAST + 2
    assert same_model(pulled(world.store, LAST + 2), world.models[-1])


def test_an_operator_goes_back_beyond_it(world: PublishedModels) -> None:
    rot_newest(world)
    committed = roll_back(world.store, open_writer(world.store, 2), version=2)
    assert committed.version == LAST + 1
    assert same_model(pulled(world.store, committed.version), world.models[2])


def test_a_snapshot_is_made_where_nothing_leads_to_the_newest_version(store: FaultyStore) -> None:
    settings = PublishSettings(snapshot_every_versions=100, snapshot_chain_ratio=100)
    world = PublishedModels(store, settings=settings, inline_snapshots=False)
    world.publish_up_to(3)
    flip(store, KEYS.entry(sequence(2)))
    assert new_compactor(store, kept=world.publisher.kept, settings=settings).compact()
    assert same_model(pulled(store, 3), world.models[3])


# ---------------------------------------------------------------- collection


def collected(world: PublishedModels, *, pinned: int | None = None) -> set[str]:
    """Keys of parts that a collector deletes."""
    before = {info.key for info in world.store.list(KEYS.parts)}
    clock = ManualClock()
    roots = Roots(pinned=frozenset() if pinned is None else frozenset({pinned}))
    collector = new_collector(world.store, clock, lambda: roots)
    collector.look()
    for _ in range(6):
        if collector.step().stage is Stage.NOTHING:
            break
        clock.now_s += GRACE_S
    else:
        raise AssertionError("there is no end to it")
    return before - {info.key for info in world.store.list(KEYS.parts)}


def parts_of(world: PublishedModels, version: int) -> set[str]:
    record = read_log(world.store).record(version)
    paths = [record.snapshot or (), *(delta.parts for delta in record.deltas)]
    return {part.key for parts in paths for part in parts}


@pytest.mark.parametrize(("version", "pinned"), [(LAST, None), (5, None), (1, 1)])
def test_what_only_a_rotten_entry_names_is_kept_while_its_version_should_stay(
    world: PublishedModels, version: int, pinned: int | None
) -> None:
    named = parts_of(world, version)
    flip(world.store, KEYS.entry(sequence(version)))
    world.store.delete(KEYS.latest)
    gone = collected(world, pinned=pinned)
    assert gone, "what is garbage beyond doubt is collected"
    assert named.isdisjoint(gone)


def test_what_only_a_rotten_entry_names_is_collected_when_its_version_need_not_stay(
    world: PublishedModels,
) -> None:
    named = parts_of(world, 1)
    flip(world.store, KEYS.entry(sequence(1)))
    assert named <= collected(world)


# ---------------------------------------------------------------- who could read more, and who less


def taken(*given: object) -> History:
    """A history of entries; None is one that cannot be read."""
    history = History(run_id=RUN, policy_id=POLICY)
    for entry in given:
        if entry is None:
            history.pass_over("rotten")
        else:
            history.take(entry, b"d" * 32)  # type: ignore[arg-type]
    return history


def versions(history: History) -> list[int | None]:
    """Entry of each version, None for one that cannot be read."""
    return [None if record.damage else record.sequence for record in history.records]


first = partial(manifest, epoch=1)


def test_a_fence_that_cannot_be_read_takes_no_number_once_a_manifest_says_so() -> None:
    history = taken(fence(0), first(1, version=0), None, manifest(3, version=1, epoch=2))
    assert versions(history) == [1, 3]


def test_a_writer_that_could_not_read_a_fence_left_a_number_out() -> None:
    history = taken(fence(0), first(1, version=0), fence(2, epoch=2), manifest(3, version=2, epoch=2))
    assert versions(history) == [1, None, 3]


def test_a_writer_that_an_unreadable_fence_shut_out_commits_nothing() -> None:
    late = first(3, version=2)
    history = taken(fence(0), first(1, version=0), None, late, manifest(4, version=1, epoch=2))
    assert versions(history) == [1, 4]


def test_no_number_is_taken_twice() -> None:
    history = taken(fence(0), first(1, version=0), first(2, version=1))
    with pytest.raises(CorruptManifest, match="commits version 1 where 2 is due"):
        history.take(manifest(3, version=1, epoch=2), b"d" * 32)


def test_a_sound_entry_that_is_already_there_is_never_replaced(store: FaultyStore) -> None:
    assert store.put_if_absent(KEYS.entry(0), b"rotten") is PutResult.CREATED
    writer = open_writer(store)
    assert (writer.log.next_sequence, store.get(KEYS.entry(0))) == (2, b"rotten")
