"""Snapshots that several processes make of their shards, behind publications that wait for none of it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from astraflow_weights.codec.tensors import Array
from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.publish import shard_publisher, sharded_snapshots
from astraflow_weights.settings import PublishSettings
from support.published_models import new_compactor, pulled, rank_publisher, read_log, steps
from support.rank_threads import PATIENCE_S, RankGone, ThreadRanks, rank_groups, run_ranks
from support.scripted_batches import eventually
from support.weight_models import KEYS, POLICY, RUN, FaultyStore, lost, same_model, split_model

EVERY_SECOND = PublishSettings(snapshot_every_versions=2, snapshot_chain_ratio=100)


class SlowStore(FaultyStore):
    """Holds the snapshot threads' parts back until its gate opens; fails them as told."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate = threading.Event()
        self.gate.set()
        self.failures = 0
        self.behind = threading.Event()
        """Set when a snapshot's part arrived."""
        self.before_put = self.hold

    def hold(self, key: str, data: bytes) -> None:
        # Deltas have kind 1 in their seventh byte.
        if key.endswith(".afwd") and data[6] == 0 and self._root.joinpath(KEYS.entry(1)).exists():
            self.behind.set()
            assert self.gate.wait(PATIENCE_S)
            if self.failures:
                self.failures -= 1
                lost(key)


@pytest.fixture
def store(tmp_path: Path) -> SlowStore:
    return SlowStore(tmp_path / "store")


@dataclass
class Process:
    """One process of a trainer: its publisher and what makes snapshots behind it."""

    ranks: ThreadRanks
    publisher: shard_publisher.ShardPublisher
    snapshots: sharded_snapshots.ShardedSnapshots
    steps: int = 0

    def publish(self, model: dict[str, Array]) -> None:
        """Publish this process's shards as the next step, and begin what is wanted."""
        self.publisher.publish(split_model(model, self.ranks.size)[self.ranks.index], step=self.steps)
        self.steps += 1
        self.snapshots.begin(self.ranks)


@contextmanager
def process(store: SlowStore, ranks: ThreadRanks, behind: ThreadRanks) -> Iterator[Process]:
    """As the trainer opens it."""
    publisher = rank_publisher(store, ranks, settings=EVERY_SECOND, inline_snapshots=False)
    with sharded_snapshots.ShardedSnapshots(
        store, run_id=RUN, policy_id=POLICY, epoch=1, kept=publisher.kept, peers=behind, threads=1
    ) as snapshots:
        yield Process(ranks, publisher, snapshots)


def run_processes(store: SlowStore, work: Callable[[Process], None], *, size: int = 2) -> None:
    """Do the work in every process; leaving waits for the snapshots."""
    behind = rank_groups(size)

    def run(ranks: ThreadRanks) -> None:
        with process(store, ranks, behind[ranks.index]) as one:
            work(one)

    run_ranks(size, run)


def offering(store: SlowStore) -> list[int]:
    """The versions that offer a snapshot."""
    return [record.version for record in read_log(store).records if record.offered_snapshot is not None]


MODELS = steps(4, density=0.05)


@pytest.mark.parametrize("size", [2, 3])
def test_what_all_processes_stored_is_a_snapshot(store: SlowStore, tmp_path: Path, size: int) -> None:
    def work(one: Process) -> None:
        one.publish(MODELS[0])
        one.snapshots.want()
        one.publish(MODELS[1])

    run_processes(store, work, size=size)
    log = read_log(store)
    assert log.record(1).snapshot is None
    assert log.record(1).offered_snapshot is not None
    mirror = Mirror(tmp_path / "mirror")
    assert mirror.advance(store, log, target=1).counts.snapshots_fetched == 1
    assert same_model(mirror.load(), MODELS[1])
    assert list(store.list(KEYS.intents)) == []


def test_versions_published_while_a_snapshot_is_stored_leave_no_byte_in_it(store: SlowStore) -> None:
    def work(one: Process) -> None:
        one.publish(MODELS[0])
        store.gate.clear()
        one.snapshots.want()
        one.publish(MODELS[1])
        assert store.behind.wait(PATIENCE_S)
        for model in MODELS[2:]:
            # Wanted again, and not begun while one is under way.
            one.snapshots.want()
            one.publish(model)
        assert read_log(store).record(3).snapshot is None
        assert read_log(store).record(1).offered_snapshot is None
        one.ranks.all_gather(b"")
        store.gate.set()

    run_processes(store, work)
    assert offering(store) == [0, 1]
    assert same_model(pulled(store, 1), MODELS[1])


def test_a_snapshot_that_one_process_cannot_store_is_dropped_by_all_and_made_later(store: SlowStore) -> None:
    store.failures = 1

    def work(one: Process) -> None:
        one.publish(MODELS[0])
        one.snapshots.want()
        one.publish(MODELS[1])
        assert one.snapshots.idle.wait(PATIENCE_S)
        one.ranks.all_gather(b"")
        one.snapshots.want()
        one.publish(MODELS[2])

    run_processes(store, work)
    assert offering(store) == [0, 2]
    assert list(store.list(KEYS.intents)) == []


def test_a_process_that_is_gone_ends_the_others_at_their_next_call(store: SlowStore) -> None:
    behind = rank_groups(2)

    def work(ranks: ThreadRanks) -> None:
        with process(store, ranks, behind[ranks.index]) as one:
            one.publish(MODELS[0])
            behind[0].leave()
            one.snapshots.want()
            one.publish(MODELS[1])
            eventually(lambda: not one.snapshots.alive, what="the end of the snapshots' thread")
            one.publish(MODELS[2])

    with pytest.raises(RankGone):
        run_ranks(2, work)
    assert offering(store) == [0]


def test_the_first_processs_compactor_asks_for_a_snapshot_when_one_is_due(store: SlowStore) -> None:
    def work(one: Process) -> None:
        want = one.snapshots.want
        compactor = new_compactor(store, kept=None, want_snapshot=want, settings=EVERY_SECOND)
        for model in MODELS:
            one.publish(model)
            if one.ranks.index == 0:
                assert compactor.compact()

    run_processes(store, work)
    # Version 2 made it due; the next one was taken.
    assert offering(store) == [0, 3]
