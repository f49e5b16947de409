"""Merged deltas and snapshots appear behind the publisher, are taken when they are cheaper, and matter to nobody
when they fail.
"""

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from astraflow_weights import codec, errors
from astraflow_weights.codec.parts.writer import Placed
from astraflow_weights.codec.shards import ShardedModel
from astraflow_weights.codec.snapshot import encode_snapshot, encode_snapshot_tiles
from astraflow_weights.codec.tiles.grid import TileCodec
from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.publish import compactor as compactor_module
from astraflow_weights.publish.compactor import Compactor
from astraflow_weights.settings import PublishSettings
from astraflow_weights.versions.planner import plan_pull
from support import rank_threads, scripted_batches, store_census, weight_processes
from support.published_models import PublishedModels, commit_parts, new_compactor, rank_publisher, read_log
from support.weight_models import (
    POLICY,
    RUN,
    FaultyStore,
    adamw_like,
    codecs_of,
    overwrite,
    same_model,
    split_model,
)

NEVER = PublishSettings(snapshot_every_versions=100_000, snapshot_chain_ratio=100)
EVERY_THIRD = PublishSettings(snapshot_every_versions=3, snapshot_chain_ratio=100)


class World(PublishedModels):
    """A store, a publisher without snapshots in its manifests, and the models it published."""

    def __init__(self, store: FaultyStore, settings: PublishSettings = NEVER) -> None:
        super().__init__(store, settings=settings, inline_snapshots=False)

    def compactor(self, *, snapshots: bool = True) -> Compactor:
        kept = self.publisher.kept if snapshots else None
        return new_compactor(self.store, kept=kept, settings=self.settings)

    def edges(self, *, held: int | None, target: int) -> list[tuple[int | None, int]]:
        plan = plan_pull(self.log(), held=held, target=target)
        return [(step.edge.base_version, step.edge.version) for step in plan.steps]

    def added(self) -> list[tuple[int | None, int]]:
        return [(path.base_version, path.version) for record in self.log().records for path in record.added]

    def census(self) -> store_census.Census:
        return store_census.take(self.store, run_id=RUN, policy_id=POLICY)


@pytest.fixture
def world(store: FaultyStore) -> World:
    return World(store)


@pytest.fixture
def eight(world: World) -> World:
    """Versions 0 to 8, of which a merged delta is due."""
    world.publish_up_to(8)
    return world


@pytest.fixture
def thirds(store: FaultyStore) -> World:
    """A world in which every third version gets a snapshot."""
    return World(store, EVERY_THIRD)


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    return Mirror(tmp_path / "mirror")


def test_a_node_eight_versions_behind_pulls_less_than_eight_deltas(world: World, mirror: Mirror) -> None:
    for model in adamw_like(17):
        world.publish(model)
    assert world.compactor().compact()
    records = world.log().records
    for base in (0, 8):
        plan = plan_pull(world.log(), held=base, target=base + 8)
        one_by_one = sum(record.delta_bytes for record in records[base + 1 : base + 9])
        assert [step.edge for step in plan.steps] == [errors.Edge(version=base + 8, base_version=base)]
        assert plan.size_bytes <= 0.6 * one_by_one
    for target in (0, 8, 16):
        world.advance(mirror, target)
    assert mirror.counts.snapshots_fetched == 1


def test_merged_deltas_of_8_and_64_versions_lead_to_the_same_bits(world: World, mirror: Mirror) -> None:
    world.publish_up_to(66)
    assert world.compactor().compact()
    assert set(world.added()) == {(base, base + 8) for base in range(0, 64, 8)} | {(0, 64)}
    assert world.edges(held=0, target=64) == [(0, 64)]
    for target in (0, 64, 7, 17, 66):
        world.advance(mirror, target)
    world.census()


def test_a_damaged_merged_delta_is_only_another_rejected_path(eight: World, mirror: Mirror) -> None:
    assert eight.compactor().compact()
    merged = eight.log().record(8).added[0]
    overwrite(eight.store, merged.parts[0].key, b"damaged")
    eight.advance(mirror, 0)
    result = eight.advance(mirror, 8)
    assert result.rejected == {errors.Edge(version=8, base_version=0)}
    assert result.counts.deltas_fetched == 8


def test_a_damaged_short_merge_does_not_spoil_the_long_one(world: World, mirror: Mirror) -> None:
    world.publish_up_to(63)
    assert world.compactor().compact()
    overwrite(world.store, world.log().record(24).added[0].parts[0].key, b"damaged")
    world.publish_up_to(64)
    assert world.compactor().compact()
    world.advance(mirror, 0)
    result = world.advance(mirror, 64)
    assert (result.counts.deltas_fetched, result.rejected) == (1, frozenset())


def test_deltas_that_need_their_base_are_merged_on_it(world: World, mirror: Mirror) -> None:
    world.models = models = adamw_like(9)
    with pytest.raises(errors.NeedsBase):
        codec.merge_deltas(
            [codec.encode_delta(models[0], models[1], context=True)],
            schema=codec.Schema.of_model(models[0]),
        )
    commit_parts(world.writer, models[0], snapshot=encode_snapshot(models[0]))
    for before, after in itertools.pairwise(models):
        commit_parts(world.writer, after, delta=codec.encode_delta(before, after, context=True))
    assert world.compactor(snapshots=False).compact()
    world.advance(mirror, 0)
    assert world.advance(mirror, 8).counts.deltas_fetched == 1


def test_versions_that_two_ranks_coded_differently_merge(store: FaultyStore, mirror: Mirror) -> None:
    """A run that was RICE goes on as RICE_CTX: one merged delta leads over both kinds."""
    models = adamw_like(9)
    sharded = [split_model(model, 2) for model in models]

    def publish(ranks: rank_threads.ThreadRanks, *, first: int, last: int, context: bool) -> None:
        base = sharded[first - 1][ranks.index] if first else None
        options: dict[str, Any] = {"inline_snapshots": False, "context": context}
        publisher = rank_publisher(store, ranks, epoch=first + 1, settings=NEVER, base=base, **options)
        for step in range(first, last + 1):
            publisher.publish(sharded[step][ranks.index], step=step)

    rank_threads.run_ranks(2, lambda ranks: publish(ranks, first=0, last=4, context=False))
    rank_threads.run_ranks(2, lambda ranks: publish(ranks, first=5, last=8, context=True))
    log = read_log(store)
    used = [codecs_of(store, record.deltas[0].parts) for record in log.records[1:]]
    assert used == [{TileCodec.RICE}] * 4 + [{TileCodec.RICE_CTX}] * 4
    assert new_compactor(store, kept=None).compact()
    log.refresh()
    for target, fetched in ((0, 0), (8, 1)):
        mirror.advance(store, log, target=target)
        assert mirror.counts.deltas_fetched == fetched
        assert same_model(mirror.load(), models[target])


def test_a_snapshot_appears_behind_the_manifest_and_starts_a_new_chain(thirds: World, mirror: Mirror) -> None:
    compactor = thirds.compactor()
    for version in range(8):
        thirds.publish_up_to(version)
        assert compactor.compact()
    assert thirds.added() == [(None, 3), (None, 6)]
    assert [record.version for record in thirds.log().records if record.snapshot] == [0]
    assert thirds.edges(held=None, target=7) == [(None, 6), (6, 7)]
    thirds.advance(mirror, 7)
    thirds.census()


def test_without_a_whole_model_no_snapshot_is_made(thirds: World) -> None:
    thirds.publish_up_to(5)
    assert thirds.compactor(snapshots=False).compact()
    assert thirds.added() == []


def test_two_makers_make_one(eight: World) -> None:
    compactors = [eight.compactor() for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(Compactor.compact, compactors))
    assert eight.added() == [(0, 8)]
    assert all(compactor.compact() for compactor in compactors)
    eight.census()


@pytest.mark.parametrize("fault", ["lose_before", "lose_after"])
def test_a_store_that_fails_costs_an_occasion(eight: World, fault: str) -> None:
    setattr(eight.store, fault, 1)
    compactor = eight.compactor()
    assert [compactor.compact(), compactor.compact()] == [False, True]
    assert eight.added() == [(0, 8)]


def test_the_thread_works_when_notified_and_ends_with_its_block(world: World) -> None:
    with world.compactor() as compactor:
        for version in range(9):
            world.publish_up_to(version)
            compactor.notify()
        scripted_batches.eventually(world.added, what="a merged delta", patience_s=60.0)
    assert not any(thread.name == "weights-compactor" for thread in threading.enumerate())
    assert world.added() == [(0, 8)]


@pytest.mark.parametrize(
    ("window", "made"),
    [("weights.compaction.parts_uploaded", []), ("weights.compaction.visible", [(0, 8)])],
)
def test_a_killed_compactor_tears_nothing(
    eight: World, tmp_path: Path, window: str, made: list[tuple[int, int]]
) -> None:
    compactor = weight_processes.start("compact", eight.store.uri, tmp_path, spec=f"{window}=kill@1")
    weight_processes.require_killed(compactor, tmp_path)
    assert (eight.added(), eight.census().num_stray_parts) == (made, 0 if made else 1)
    assert eight.compactor().compact()
    assert eight.added() == [(0, 8)]
    assert eight.census().num_stray_parts == 0


def test_a_version_published_while_a_snapshot_is_encoded_leaves_the_snapshot_whole(
    thirds: World, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    thirds.publish_up_to(3)

    def encode_late(shards: ShardedModel) -> Iterator[Placed]:
        for version, placed in enumerate(encode_snapshot_tiles(shards), start=4):
            thirds.publish_up_to(version)
            yield placed

    monkeypatch.setattr(compactor_module, "encode_snapshot_tiles", encode_late)
    assert thirds.compactor().compact()
    assert thirds.added() == [(None, 3)]
    assert len(thirds.models) > 6
    for target in (3, len(thirds.models) - 1):
        thirds.advance(mirror, target)
    assert thirds.edges(held=None, target=3) == [(None, 3)]
