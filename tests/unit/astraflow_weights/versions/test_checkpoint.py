"""A log begins at a checkpoint: the same versions in a few requests, whatever becomes of checkpoints and makers."""

import itertools
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow_weights.errors import Edge, Fenced, Unavailable
from astraflow_weights.publish.log_keeping import keep_log
from astraflow_weights.store import ObjectInfo
from astraflow_weights.versions import manifest as entries
from astraflow_weights.versions.collection_records import Sweep, encode_sweep
from astraflow_weights.versions.log import VersionLog, path_key
from support.log_records import TENSORS, added_path, fence, manifest
from support.published_models import open_writer, read_log
from support.stepped_store import Actor, MemoryStore, Stage
from support.weight_models import KEYS, flip

VERSIONS = 5_000
EVERY = 64
PARTS = tuple(
    entries.PartRef(key=KEYS.part(f"{number:064x}"), size_bytes=number, sha256=number.to_bytes(32, "big"))
    for number in range(1, 40)
)


class CountingStore(MemoryStore):
    """Counts requests, and the bytes of what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = 0
        self.read_bytes = 0

    def get(self, key: str) -> bytes:
        """Content."""
        self.requests += 1
        content = super().get(key)
        self.read_bytes += len(content)
        return content

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Objects; one request for each thousand."""
        keys = sorted(key for key in self.objects if key.startswith(prefix) and key > after)
        self.requests += 1 + len(keys) // 1000
        return iter([ObjectInfo(key=key, size_bytes=len(self.objects[key])) for key in keys])

    def cost(self, action: Callable[[], object]) -> tuple[int, int]:
        """Requests and bytes that an action takes."""
        before = self.requests, self.read_bytes
        action()
        return self.requests - before[0], self.read_bytes - before[1]


def version(number: int, *, sequence: int, epoch: int = 1) -> entries.ManifestEntry:
    """One with a delta, or a snapshot every 64."""
    part = entries.PartRef(
        key=KEYS.part(f"{number:064x}"), size_bytes=1000 + number, sha256=number.to_bytes(32, "big")
    )
    whole = number % EVERY == 0
    return manifest(
        sequence,
        version=number,
        epoch=epoch,
        snapshot=(part,) if whole else None,
        deltas=() if whole else (entries.DeltaRef(base_version=number - 1, parts=(part,)),),
    )


def write(store: MemoryStore, *added: entries.Entry) -> None:
    for entry in added:
        store.put_if_absent(KEYS.entry(entry.sequence), entries.encode_entry(entry))


def keep(store: MemoryStore, *, every: int = 1) -> VersionLog:
    """What the compactor of a trainer that has just started does."""
    log = read_log(store)
    keep_log(store, log, every_entries=every)
    return log


def state(log: VersionLog) -> tuple[object, ...]:
    """All that a log knows."""
    return list(log.records), log.next_sequence, log.owner, log.num_ignored, dict(log.unreadable)


def from_entries(store: MemoryStore) -> tuple[object, ...]:
    """What the log says without checkpoints."""
    bare = MemoryStore()
    bare.objects = {key: data for key, data in store.objects.items() if not key.startswith(KEYS.checkpoints)}
    return state(read_log(bare))


def test_a_join_costs_a_few_requests_whatever_the_length_of_the_log() -> None:
    store = CountingStore()
    write(store, fence(0), *(version(number, sequence=number + 1) for number in range(VERSIONS)))
    log = VersionLog(store, run_id=KEYS.run_id, policy_id=KEYS.policy_id)
    before = store.cost(log.refresh)
    keep_log(store, log, every_entries=EVERY)
    joined: list[VersionLog] = []
    after = store.cost(lambda: joined.append(read_log(store)))
    write(store, *(version(VERSIONS + more, sequence=VERSIONS + more + 1) for more in range(EVERY - 1)))
    worst = store.cost(lambda: read_log(store))
    resumed = store.cost(lambda: open_writer(store, 2))
    assert before[0] > VERSIONS
    assert after[0] <= 8
    assert worst[0] <= 8 + EVERY
    assert resumed[0] <= 8 + EVERY
    assert after[1] < 180 * VERSIONS
    assert state(joined[0]) == state(log)


def test_a_log_of_the_checkpoint_knows_all_that_its_entries_say() -> None:
    store = MemoryStore()
    write(store, fence(0), *(version(number, sequence=number + 1) for number in range(6)))
    write(store, fence(7, epoch=3), manifest(8, version=6), version(6, sequence=9, epoch=3))
    back = manifest(10, version=7, epoch=3, rollback_of=2, snapshot=(PARTS[0], PARTS[1]))
    write(store, back, fence(11, epoch=4))
    for path in (added_path(5, base=2, size_bytes=9, root=manifest(0, version=5).model_root),):
        store.put_if_absent(path_key(KEYS, path), entries.encode_path(path))
    swept = Sweep(
        number=0,
        kept_parts=frozenset(),
        paths=frozenset({Edge(version=1, base_version=0), Edge(version=0, base_version=None)}),
        added_paths=(),
        tombstone_sha256=b"t" * 32,
        created_time_s=0,
    )
    store.put_if_absent(KEYS.sweep(0), encode_sweep(KEYS, swept))
    keep(store)
    log = read_log(store)
    assert log.checkpointed == log.next_sequence == 12
    assert state(log) == from_entries(store)
    write(store, version(8, sequence=12, epoch=4))
    assert state(read_log(store)) == from_entries(store)


def test_paths_that_were_collected_since_the_checkpoint_are_gone() -> None:
    store = MemoryStore()
    write(store, fence(0), *(version(number, sequence=number + 1) for number in range(4)))
    path = added_path(3, base=0, size_bytes=9, root=manifest(0, version=3).model_root)
    store.put_if_absent(path_key(KEYS, path), entries.encode_path(path))
    keep(store)
    assert read_log(store).record(3).added == (path,)
    store.delete(path_key(KEYS, path))
    assert read_log(store).record(3).added == ()


def test_an_entry_that_rots_below_a_checkpoint_costs_only_its_tensors() -> None:
    store = MemoryStore()
    write(store, fence(0), *(version(number, sequence=number + 1) for number in range(4)))
    keep(store)
    whole = state(read_log(store))
    flip(store, KEYS.entry(2))
    log = read_log(store)
    assert (state(log), dict(log.unreadable)) == (whole, {})


@pytest.mark.parametrize("damage", [flip, MemoryStore.delete], ids=["flipped", "deleted"])
def test_without_the_newest_checkpoint_the_one_before_serves(
    damage: Callable[[MemoryStore, str], None],
) -> None:
    store = CountingStore()
    write(store, fence(0), *(version(number, sequence=number + 1) for number in range(20)))
    keep(store)
    write(store, *(version(number, sequence=number + 1) for number in range(20, 25)))
    keep(store)
    newest = max(key for key in store.objects if key.startswith(KEYS.checkpoints))
    damage(store, newest)
    requests, _ = store.cost(lambda: read_log(store))
    assert requests <= 15
    assert state(read_log(store)) == from_entries(store)


def test_a_checkpoint_of_a_log_that_was_begun_anew_is_passed_over() -> None:
    store = MemoryStore()
    write(store, fence(0), *(version(number, sequence=number + 1) for number in range(4)))
    keep(store)
    for key in [key for key in store.objects if key.startswith(KEYS.entries)]:
        store.delete(key)
    write(store, fence(0, epoch=9), *(version(number, sequence=number + 1, epoch=9) for number in range(6)))
    log = read_log(store)
    assert list(log.damaged_checkpoints) == [KEYS.checkpoint(5)]
    assert state(log) == from_entries(store)


def test_three_checkpoints_stay() -> None:
    store = MemoryStore()
    write(store, fence(0))
    for number in range(6):
        write(store, version(number, sequence=number + 1))
        keep(store)
    kept = sorted(key for key in store.objects if key.startswith(KEYS.checkpoints))
    assert kept == [KEYS.checkpoint(number) for number in (5, 6, 7)]


def trains(epoch: int, *, versions: int) -> Callable[[Actor], None]:
    """A writer that commits versions until another one takes over."""

    def work(store: Actor) -> None:
        try:
            writer = open_writer(store, epoch)
            for step in range(versions):
                writer.commit(step=100 * epoch + step, tensors=TENSORS, snapshot=PARTS[step : step + 1])
        except (Fenced, Unavailable):
            return

    return work


def keeps(store: Actor) -> None:
    """A compactor, twice."""
    log = VersionLog(store, run_id=KEYS.run_id, policy_id=KEYS.policy_id)
    for _ in range(2):
        log.refresh_entries()
        keep_log(store, log, every_entries=1)


TURNS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 24)), max_size=80)


@settings(max_examples=25, deadline=None)
@given(TURNS, st.integers(0, 3))
def test_writers_and_makers_of_checkpoints_interleave_and_die_anywhere(
    turns: list[tuple[int, int]], rots: int
) -> None:
    stage = Stage()
    store = stage.store
    actors = [
        stage.start("first", trains(1, versions=3)),
        stage.start("second", trains(2, versions=2)),
        stage.start("keeper", keeps),
        stage.start("other keeper", keeps),
    ]
    schedule = itertools.chain(turns, itertools.cycle([(turn, 1) for turn in range(4)]))
    while alive := [actor for actor in actors if not actor.done]:
        turn, fate = next(schedule)
        actor = alive[turn % len(alive)]
        stage.kill(actor) if fate == 0 else stage.step(actor)
        assert state(read_log(store)) == from_entries(store)
    found = sorted(key for key in store.objects if key.startswith(KEYS.checkpoints))
    for key in found[:rots]:
        flip(store, key)
    assert state(read_log(store)) == from_entries(store)
