"""Snapshots that several processes make of their shards, behind publications that wait for none of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from astraflow_weights.codec.tensors import Array
from astraflow_weights.errors import Unavailable
from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.publish.compactor import Compactor
from astraflow_weights.publish.shard_publisher import ShardPublisher
from astraflow_weights.publish.sharded_snapshots import ShardedSnapshots
from astraflow_weights.publish.uploads import Uploads
from astraflow_weights.settings import PublishSettings
from astraflow_weights.store import PutResult
from astraflow_weights.store.file import FileStore
from astraflow_weights.store.layout import PolicyKeys
from support.published_models import open_writer, read_log, steps
from support.rank_threads import PATIENCE_S, RankGone, ThreadRanks, rank_groups, run_ranks
from support.scripted_batches import eventually
from support.weight_models import POLICY, RUN, same_model, split_model

KEYS = PolicyKeys(RUN, POLICY)
EVERY_SECOND = PublishSettings(snapshot_every_versions=2, snapshot_chain_ratio=100)


class SlowStore(FileStore):
    """Holds the snapshot threads' parts back until its gate opens; fails them as told."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate = threading.Event()
        self.gate.set()
        self.failures = 0
        self.behind = threading.Event()
        """Set when a snapshot's part arrived."""

    def put_if_absent(self, key: str, data: bytes) -> PutResult:
        # Deltas have kind 1 in their seventh byte.
        if key.endswith(".afwd") and data[6] == 0 and self._root.joinpath(KEYS.entry(1)).exists():
            self.behind.set()
            assert self.gate.wait(PATIENCE_S)
            if self.failures:
                self.failures -= 1
                raise Unavailable("the store restarts")
        return super().put_if_absent(key, data)


@dataclass
class Process:
    """One process of a trainer: its publisher and what makes snapshots behind it."""

    ranks: ThreadRanks
    publisher: ShardPublisher
    snapshots: ShardedSnapshots
    steps: int = 0

    def publish(self, model: dict[str, Array]) -> None:
        """Publish this process's shards as the next step, and begin what is wanted."""
        self.publisher.publish(split_model(model, self.ranks.size)[self.ranks.index], step=self.steps)
        self.steps += 1
        self.snapshots.begin(self.ranks)


@contextmanager
def process(store: FileStore, ranks: ThreadRanks, behind: ThreadRanks) -> Iterator[Process]:
    """As the trainer opens it."""
    writer = None
    if ranks.index == 0:
        writer = open_writer(store, epoch=1, settings=EVERY_SECOND)
    uploads = writer.uploads if writer else Uploads(store, keys=KEYS, threads=1)
    publisher = ShardPublisher(writer, uploads=uploads, peers=ranks, base=None, inline_snapshots=False)
    snapshots = ShardedSnapshots(
        store, run_id=RUN, policy_id=POLICY, epoch=1, kept=publisher.kept, peers=behind, threads=1
    )
    with snapshots:
        yield Process(ranks, publisher, snapshots)


@pytest.mark.parametrize("size", [2, 3])
def test_what_all_processes_stored_is_a_snapshot_of_the_version_that_was_published(
    tmp_path: Path, size: int
) -> None:
    store, models = SlowStore(tmp_path / "store"), steps(3, density=0.05)
    behind = rank_groups(size)

    def work(ranks: ThreadRanks) -> None:
        with process(store, ranks, behind[ranks.index]) as one:
            one.publish(models[0])
            one.snapshots.want()
            one.publish(models[1])
        # Leaving waited for the snapshot.

    run_ranks(size, work)
    log = read_log(store)
    assert log.record(1).snapshot is None
    assert log.record(1).offered_snapshot is not None
    mirror = Mirror(tmp_path / "mirror")
    assert mirror.advance(store, log, target=1).counts.snapshots_fetched == 1
    assert same_model(mirror.load(), models[1])
    assert list(store.list(KEYS.intents)) == []


def test_versions_are_published_while_a_snapshot_is_being_stored_and_it_holds_none_of_their_bytes(
    tmp_path: Path,
) -> None:
    store, models = SlowStore(tmp_path / "store"), steps(4, density=0.05)
    behind = rank_groups(2)

    def work(ranks: ThreadRanks) -> None:
        with process(store, ranks, behind[ranks.index]) as one:
            one.publish(models[0])
            store.gate.clear()
            one.snapshots.want()
            one.publish(models[1])
            assert store.behind.wait(PATIENCE_S)
            for model in models[2:]:
                # Wanted again, and not begun while one is under way.
                one.snapshots.want()
                one.publish(model)
            assert read_log(store).record(3).snapshot is None
            assert read_log(store).record(1).offered_snapshot is None
            ranks.all_gather(b"")
            store.gate.set()

    run_ranks(2, work)
    log = read_log(store)
    assert [log.record(version).offered_snapshot is not None for version in range(4)] == [
        True,
        True,
        False,
        False,
    ]
    mirror = Mirror(tmp_path / "mirror")
    mirror.advance(store, log, target=1)
    assert same_model(mirror.load(), models[1])


def test_a_snapshot_that_one_process_cannot_store_is_dropped_by_all_and_made_when_wanted_again(
    tmp_path: Path,
) -> None:
    store, models = SlowStore(tmp_path / "store"), steps(3, density=0.05)
    store.failures = 1
    behind = rank_groups(2)

    def work(ranks: ThreadRanks) -> None:
        with process(store, ranks, behind[ranks.index]) as one:
            one.publish(models[0])
            one.snapshots.want()
            one.publish(models[1])
            assert one.snapshots.idle.wait(PATIENCE_S)
            ranks.all_gather(b"")
            one.snapshots.want()
            one.publish(models[2])

    run_ranks(2, work)
    log = read_log(store)
    assert [log.record(version).offered_snapshot is not None for version in range(3)] == [True, False, True]
    assert list(store.list(KEYS.intents)) == []


def test_a_process_that_is_gone_ends_the_others_at_their_next_call(tmp_path: Path) -> None:
    store, models = SlowStore(tmp_path / "store"), steps(3, density=0.05)
    behind = rank_groups(2)

    def work(ranks: ThreadRanks) -> None:
        with process(store, ranks, behind[ranks.index]) as one:
            one.publish(models[0])
            behind[0].leave()
            one.snapshots.want()
            one.publish(models[1])
            eventually(lambda: not one.snapshots.alive, what="the end of the snapshots' thread")
            one.publish(models[2])

    with pytest.raises(RankGone):
        run_ranks(2, work)
    assert read_log(store).record(1).offered_snapshot is None


def test_the_first_processs_compactor_asks_for_a_snapshot_when_one_is_due(tmp_path: Path) -> None:
    store, models = SlowStore(tmp_path / "store"), steps(4, density=0.05)
    behind = rank_groups(2)

    def work(ranks: ThreadRanks) -> None:
        with process(store, ranks, behind[ranks.index]) as one:
            compactor = Compactor(
                store,
                run_id=RUN,
                policy_id=POLICY,
                kept=None,
                want_snapshot=one.snapshots.want,
                settings=EVERY_SECOND,
            )
            for model in models:
                one.publish(model)
                if ranks.index == 0:
                    assert compactor.compact()

    run_ranks(2, work)
    log = read_log(store)
    # Version 2 made it due; the next one was taken.
    assert [log.record(version).offered_snapshot is not None for version in range(4)] == [
        True,
        False,
        False,
        True,
    ]
