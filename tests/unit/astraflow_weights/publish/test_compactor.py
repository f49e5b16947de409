"""Merged deltas and snapshots appear behind the publisher, are taken when they are cheaper, and matter to nobody
when they fail.
"""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from astraflow_kit import failpoints
from astraflow_weights.codec import encode_delta, merge_deltas
from astraflow_weights.codec.parts.writer import Placed
from astraflow_weights.codec.shards import ShardedModel
from astraflow_weights.codec.snapshot import encode_snapshot, encode_snapshot_tiles
from astraflow_weights.codec.tensor_hash import tensor_digests
from astraflow_weights.codec.tiles.grid import TileCodec
from astraflow_weights.errors import Edge, NeedsBase
from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.publish import compactor as compactor_module
from astraflow_weights.publish.compactor import Compactor
from astraflow_weights.publish.shard_publisher import ShardPublisher
from astraflow_weights.publish.uploads import Uploads
from astraflow_weights.settings import PublishSettings
from astraflow_weights.store.layout import PolicyKeys
from astraflow_weights.versions.log import VersionLog
from astraflow_weights.versions.manifest import DeltaRef
from astraflow_weights.versions.planner import plan_pull
from support.armed import armed
from support.published_models import PublishedModels, open_writer, read_log
from support.rank_threads import ThreadRanks, run_ranks
from support.store_census import take
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
KEYS = PolicyKeys(RUN, POLICY)


class World(PublishedModels):
    """A store, a publisher without snapshots in its manifests, and the models it published."""

    def __init__(self, folder: Path, settings: PublishSettings = NEVER) -> None:
        self.folder = folder
        self.settings = settings
        self.store = FaultyStore(folder / "store")
        super().__init__(self.store, settings=settings, inline_snapshots=False)

    def compactor(self, *, snapshots: bool = True) -> Compactor:
        return Compactor(
            self.store,
            run_id=RUN,
            policy_id=POLICY,
            kept=self.publisher.kept if snapshots else None,
            settings=self.settings,
        )

    def log(self) -> VersionLog:
        return read_log(self.store)

    def edges(self, *, held: int | None, target: int) -> list[tuple[int | None, int]]:
        plan = plan_pull(self.log(), held=held, target=target)
        return [(step.edge.base_version, step.edge.version) for step in plan.steps]

    def added(self) -> list[tuple[int | None, int]]:
        return [(path.base_version, path.version) for record in self.log().records for path in record.added]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_node_eight_versions_behind_pulls_much_less_than_the_deltas_and_never_a_dearer_snapshot(
    world: World,
) -> None:
    for model in adamw_like(17):
        world.publish(model)
    assert world.compactor().compact()
    records = world.log().records
    for base in (0, 8):
        plan = plan_pull(world.log(), held=base, target=base + 8)
        one_by_one = sum(record.delta_bytes for record in records[base + 1 : base + 9])
        assert [step.edge for step in plan.steps] == [Edge(version=base + 8, base_version=base)]
        assert plan.size_bytes <= 0.6 * one_by_one
    mirror = Mirror(world.folder / "mirror")
    for target in (0, 8, 16):
        mirror.advance(world.store, world.log(), target=target)
        assert same_model(mirror.load(), world.models[target])
    assert mirror.counts.snapshots_fetched == 1


def test_merged_deltas_of_8_and_64_versions_lead_to_the_same_bits(world: World) -> None:
    world.publish_up_to(66)
    assert world.compactor().compact()
    assert set(world.added()) == {(base, base + 8) for base in range(0, 64, 8)} | {(0, 64)}
    assert world.edges(held=0, target=64) == [(0, 64)]
    mirror = Mirror(world.folder / "mirror")
    mirror.advance(world.store, world.log(), target=0)
    for target in (64, 7, 17, 66):
        mirror.advance(world.store, world.log(), target=target)
        assert same_model(mirror.load(), world.models[target])
    take(world.store, run_id=RUN, policy_id=POLICY)


def test_a_damaged_merged_delta_is_only_another_rejected_path(world: World) -> None:
    world.publish_up_to(8)
    assert world.compactor().compact()
    merged = world.log().record(8).added[0]
    overwrite(world.store, merged.parts[0].key, b"damaged")
    mirror = Mirror(world.folder / "mirror")
    mirror.advance(world.store, world.log(), target=0)
    result = mirror.advance(world.store, world.log(), target=8)
    assert result.rejected == {Edge(version=8, base_version=0)}
    assert result.counts.deltas_fetched == 8
    assert same_model(mirror.load(), world.models[8])


def test_a_damaged_short_merge_does_not_spoil_the_long_one(world: World) -> None:
    world.publish_up_to(63)
    assert world.compactor().compact()
    overwrite(world.store, world.log().record(24).added[0].parts[0].key, b"damaged")
    world.publish_up_to(64)
    assert world.compactor().compact()
    mirror = Mirror(world.folder / "mirror")
    mirror.advance(world.store, world.log(), target=0)
    result = mirror.advance(world.store, world.log(), target=64)
    assert (result.counts.deltas_fetched, result.rejected) == (1, frozenset())
    assert same_model(mirror.load(), world.models[64])


def test_deltas_that_need_their_base_are_merged_on_it(tmp_path: Path) -> None:
    store = FaultyStore(tmp_path / "store")
    writer = open_writer(store, epoch=1, settings=NEVER)
    models = adamw_like(9)
    with pytest.raises(NeedsBase):
        merge_deltas([encode_delta(models[0], models[1], context=True)])
    for version, model in enumerate(models):
        parts = [] if not version else encode_delta(models[version - 1], model, context=True)
        snapshot = writer.uploads.upload_parts(encode_snapshot(model)) if not version else None
        deltas = (
            (DeltaRef(base_version=version - 1, parts=writer.uploads.upload_parts(parts)),) if parts else ()
        )
        writer.commit(step=version, tensors=tensor_digests(model), snapshot=snapshot, deltas=deltas)
    assert Compactor(store, run_id=RUN, policy_id=POLICY, kept=None).compact()
    log = read_log(store)
    mirror = Mirror(tmp_path / "mirror")
    mirror.advance(store, log, target=0)
    assert mirror.advance(store, log, target=8).counts.deltas_fetched == 1
    assert same_model(mirror.load(), models[8])


def test_versions_that_two_ranks_coded_differently_merge(tmp_path: Path) -> None:
    """A run that was RICE goes on as RICE_CTX: one merged delta leads over both kinds."""
    store, models = FaultyStore(tmp_path / "store"), adamw_like(9)
    sharded = [split_model(model, 2) for model in models]

    def publish(ranks: ThreadRanks, *, first: int, last: int, context: bool) -> None:
        writer = None
        if ranks.index == 0:
            writer = open_writer(store, epoch=first + 1, settings=NEVER)
        publisher = ShardPublisher(
            writer,
            uploads=writer.uploads if writer else Uploads(store, keys=KEYS, threads=1),
            peers=ranks,
            base=sharded[first - 1][ranks.index] if first else None,
            inline_snapshots=False,
            context=context,
        )
        for step in range(first, last + 1):
            publisher.publish(sharded[step][ranks.index], step=step)

    run_ranks(2, lambda ranks: publish(ranks, first=0, last=4, context=False))
    run_ranks(2, lambda ranks: publish(ranks, first=5, last=8, context=True))
    log = read_log(store)
    used = [codecs_of(store, record.deltas[0].parts) for record in log.records[1:]]
    assert used == [{TileCodec.RICE}] * 4 + [{TileCodec.RICE_CTX}] * 4
    assert Compactor(store, run_id=RUN, policy_id=POLICY, kept=None).compact()
    log.refresh()
    mirror = Mirror(tmp_path / "mirror")
    for target, fetched in ((0, 0), (8, 1)):
        mirror.advance(store, log, target=target)
        assert mirror.counts.deltas_fetched == fetched
        assert same_model(mirror.load(), models[target])


def test_a_snapshot_appears_behind_the_manifest_and_starts_the_next_chain(tmp_path: Path) -> None:
    world = World(tmp_path, EVERY_THIRD)
    compactor = world.compactor()
    for version in range(8):
        world.publish_up_to(version)
        assert compactor.compact()
    assert world.added() == [(None, 3), (None, 6)]
    assert [record.version for record in world.log().records if record.snapshot] == [0]
    assert world.edges(held=None, target=7) == [(None, 6), (6, 7)]
    mirror = Mirror(tmp_path / "mirror")
    mirror.advance(world.store, world.log(), target=7)
    assert same_model(mirror.load(), world.models[7])
    take(world.store, run_id=RUN, policy_id=POLICY)


def test_without_a_whole_model_no_snapshot_is_made(tmp_path: Path) -> None:
    world = World(tmp_path, EVERY_THIRD)
    world.publish_up_to(5)
    assert world.compactor(snapshots=False).compact()
    assert world.added() == []


def test_two_makers_make_one(world: World) -> None:
    world.publish_up_to(8)
    first, second = world.compactor(), world.compactor()
    threads = [threading.Thread(target=each.compact) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert world.added() == [(0, 8)]
    assert first.compact()
    assert second.compact()
    take(world.store, run_id=RUN, policy_id=POLICY)


@pytest.mark.parametrize(
    ("window", "visible"),
    [("weights.compaction.parts_uploaded", False), ("weights.compaction.visible", True)],
)
def test_what_a_death_cut_short_is_made_at_the_next_occasion(
    world: World, tmp_path: Path, window: str, visible: bool
) -> None:
    world.publish_up_to(8)
    log = tmp_path / "failpoints.log"
    with armed(f"{window}=raise@1", log_path=log):
        assert not world.compactor().compact()
    assert [hit.name for hit in failpoints.read_hits(log) if hit.acted] == [window]
    assert world.added() == ([(0, 8)] if visible else [])
    take(world.store, run_id=RUN, policy_id=POLICY)
    assert world.compactor().compact()
    assert world.added() == [(0, 8)]


@pytest.mark.parametrize("fault", ["lose_before", "lose_after"])
def test_a_store_that_fails_costs_an_occasion(world: World, fault: str) -> None:
    world.publish_up_to(8)
    setattr(world.store, fault, 1)
    compactor = world.compactor()
    assert not compactor.compact()
    assert compactor.compact()
    assert world.added() == [(0, 8)]


def test_the_thread_works_when_notified_and_ends_with_its_block(world: World) -> None:
    with world.compactor() as compactor:
        for version in range(9):
            world.publish_up_to(version)
            compactor.notify()
        deadline = time.monotonic() + 60
        while not world.added() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert not any(thread.name == "weights-compactor" for thread in threading.enumerate())
    assert world.added() == [(0, 8)]


_COMPACTOR = """
import sys
from pathlib import Path
from astraflow_kit import failpoints
from astraflow_weights.publish.compactor import Compactor
from astraflow_weights.store.file import FileStore
folder, run, policy, window = Path(sys.argv[1]), *sys.argv[2:]
failpoints.arm(f"{window}=kill@1", log_path=folder / "failpoints.log")
Compactor(FileStore(folder / "store"), run_id=run, policy_id=policy, kept=None).compact()
"""


@pytest.mark.parametrize(
    ("window", "visible"),
    [("weights.compaction.parts_uploaded", False), ("weights.compaction.visible", True)],
)
def test_a_killed_compactor_leaves_a_whole_log(world: World, window: str, visible: bool) -> None:
    world.publish_up_to(8)
    command = [sys.executable, "-c", _COMPACTOR, str(world.folder), RUN, POLICY, window]
    assert subprocess.run(command, timeout=60, check=False).returncode == -signal.SIGKILL
    assert [hit.name for hit in failpoints.read_hits(world.folder / "failpoints.log") if hit.acted] == [
        window
    ]
    census = take(world.store, run_id=RUN, policy_id=POLICY)
    assert (world.added(), census.num_stray_parts) == (([(0, 8)], 0) if visible else ([], 1))
    assert world.compactor().compact()
    assert world.added() == [(0, 8)]
    assert take(world.store, run_id=RUN, policy_id=POLICY).num_stray_parts == 0


def test_a_version_published_while_a_snapshot_is_encoded_leaves_the_snapshot_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, EVERY_THIRD)
    world.publish_up_to(3)

    def encode_late(shards: ShardedModel) -> Iterator[Placed]:
        for version, placed in enumerate(encode_snapshot_tiles(shards), start=4):
            world.publish_up_to(version)
            yield placed

    monkeypatch.setattr(compactor_module, "encode_snapshot_tiles", encode_late)
    assert world.compactor().compact()
    assert world.added() == [(None, 3)]
    assert len(world.models) > 6
    mirror = Mirror(tmp_path / "mirror")
    for target in (3, len(world.models) - 1):
        mirror.advance(world.store, world.log(), target=target)
        assert same_model(mirror.load(), world.models[target])
    assert world.edges(held=None, target=3) == [(None, 3)]
