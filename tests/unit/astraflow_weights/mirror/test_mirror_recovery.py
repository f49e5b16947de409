"""Whatever dies or rots, a mirror is whole again without fetching more than what is lost."""

import random
from pathlib import Path

import numpy as np
import pytest

from astraflow_kit import failpoints
from astraflow_kit.failpoints import FailpointRaised
from astraflow_weights.codec import Array, encode_delta, encode_snapshot, tensors
from astraflow_weights.codec.parts.reader import open_part
from astraflow_weights.codec.tiles.grid import TileCodec
from astraflow_weights.errors import Edge, MirrorBusy, Unavailable, VerificationFailed
from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.settings import MirrorSettings
from support import weight_processes
from support.armed import armed
from support.published_models import PublishedModels, commit_parts
from support.weight_models import FaultyStore, copied, lost, make_model, overwrite, same_model

pytestmark = pytest.mark.slow

# The first tensor has three tiles, of 4 MiB, 4 MiB and the rest; parts are small, so a tile needs few of them.
ROWS = 2 * tensors.MAX_TILE_ELEMENTS // 64 + 1000
PART_BYTES = 2**20
TENSOR = "model.embed.weight"


class World(PublishedModels):
    """A store whose versions 1 and 2 are deltas on a snapshot of several parts, and the models in them."""

    def __init__(self, store: FaultyStore, folder: Path, *, context: bool) -> None:
        super().__init__(store)
        self.folder = folder
        self.weights = folder / "mirror" / "checkpoint" / "model.safetensors"
        self.context = context
        model = make_model(rows=ROWS)
        self.commit(model, snapshot=encode_snapshot(model, part_bytes=PART_BYTES))
        for step in (1, 2):
            after = stepped(model, step)
            parts = encode_delta(model, after, context=context, part_bytes=PART_BYTES)
            codecs = {codec for part in parts for codec in open_part(part).codecs}
            assert (TileCodec.RICE_CTX in codecs) == context
            self.commit(after, delta=parts)
            model = after

    def commit(self, model: dict[str, Array], **parts: list[bytes]) -> None:
        commit_parts(self.writer, model, **parts)
        self.models.append(model)

    def mirror(self) -> Mirror:
        return Mirror(self.folder / "mirror", settings=MirrorSettings(apply_threads=2, lock_patience_s=0.2))

    def mirror_at(self, version: int) -> Mirror:
        mirror = self.mirror()
        self.advance(mirror, version)
        return mirror

    def rot(self, tile: int) -> None:
        """Change bytes in the middle of a tile of the first tensor."""
        # The file has the widest tensors first, then those of a width by name.
        ordered = sorted(self.models[0], key=lambda key: (-self.models[0][key].dtype.itemsize, key))
        behind = sum(self.models[0][key].nbytes for key in ordered[ordered.index(TENSOR) :])
        at = self.weights.stat().st_size - behind + tile * tensors.MAX_TILE_ELEMENTS * 2 + 1000
        with self.weights.open("r+b") as file:
            file.seek(at)
            before = file.read(64)
            file.seek(at)
            file.write(bytes(byte ^ 0xFF for byte in before))

    def holds(self, version: int) -> bool:
        """Whether a mirror that is opened now holds this version, to the last bit."""
        mirror = self.mirror()
        return mirror.version == version and same_model(mirror.load(), self.models[version])


def stepped(model: dict[str, Array], seed: int) -> dict[str, Array]:
    """As AdamW moves weights: the smaller one is, the more often its bits change, which RICE_CTX makes use of."""
    draw = np.random.default_rng(seed)
    after = copied(model)
    flat = after[TENSOR].reshape(-1)
    small = (flat >> 7) & 0xFF < 119
    flat[draw.random(flat.size) < np.where(small, 0.04, 0.0004)] += 1
    return after


@pytest.fixture(params=[False, True], ids=["rice", "context"])
def world(store: FaultyStore, tmp_path: Path, request: pytest.FixtureRequest) -> World:
    return World(store, tmp_path, context=request.param)


rice_only = pytest.mark.parametrize("world", [False], ids=["rice"], indirect=True)


def kill_puller(world: World, *, target: int, spec: str) -> None:
    """Advance in a process of its own until its failpoint kills it."""
    puller = weight_processes.start("advance", world.store.uri, world.folder, number=target, spec=spec)
    weight_processes.require_killed(puller, world.folder)
    assert failpoints.read_hits(world.folder / "hits")[-1].name == spec.partition("=")[0]


@pytest.mark.parametrize(
    ("spec", "version"),
    [
        ("weights.mirror.fetched=kill", 0),
        ("weights.mirror.applying=kill", 2),
        ("weights.mirror.tile=kill@1", 2),
        ("weights.mirror.tile=kill@3", 2),
        ("weights.mirror.tile_torn=kill@1", 2),
        ("weights.mirror.tile_torn=kill@3", 2),
        ("weights.mirror.applied=kill", 2),
    ],
)
def test_the_next_opening_ends_what_a_killed_puller_applied(world: World, spec: str, version: int) -> None:
    world.mirror_at(0)
    kill_puller(world, target=2, spec=spec)
    assert world.holds(version)
    world.store.gets.clear()
    mirror = world.mirror_at(2)
    assert mirror.counts.fetched_bytes == 0, "what was fetched by the killed process is fetched again"
    assert world.holds(2)


@pytest.mark.parametrize("point", ["weights.mirror.tile_torn", "weights.mirror.applied"])
def test_a_recovery_that_is_killed_is_recovered_by_the_next(world: World, point: str) -> None:
    world.mirror_at(0)
    kill_puller(world, target=2, spec="weights.mirror.tile_torn=kill@1")
    (world.folder / "hits").unlink()
    kill_puller(world, target=2, spec=f"{point}=kill@1")
    assert world.holds(2)


def test_a_first_pull_that_is_killed_when_the_file_is_in_place_is_not_repeated(world: World) -> None:
    kill_puller(world, target=1, spec="weights.mirror.replaced=kill")
    assert world.holds(1)
    assert world.mirror_at(1).counts.fetched_bytes == 0


def test_a_tile_that_rotted_is_fetched_alone(world: World) -> None:
    world.mirror_at(2)
    world.rot(1)
    mirror = world.mirror()
    assert (mirror.version, mirror.try_hold()) == (None, None)
    counts = world.advance(mirror, 2).counts
    assert world.holds(2)
    assert (counts.repaired_tiles, counts.snapshots_fetched, counts.deltas_fetched) == (1, 0, 0)
    snapshot = sum(part.size_bytes for part in world.log().record(0).snapshot or ())
    assert counts.fetched_bytes < 0.55 * snapshot, "about one tile of two and a bit"


def test_a_tile_that_rotted_while_open_is_repaired_before_the_next_version_is_applied(world: World) -> None:
    mirror = world.mirror_at(1)
    world.rot(0)
    result = world.advance(mirror, 2)
    assert (result.base_version, result.counts.repaired_tiles, result.counts.snapshots_fetched) == (1, 1, 0)
    assert world.holds(2)


@rice_only
def test_a_tile_that_nothing_changes_is_repaired_too(world: World) -> None:
    after = copied(world.models[2])
    after[TENSOR].reshape(-1)[5] += 1
    world.commit(after, delta=encode_delta(world.models[2], after))
    mirror = world.mirror_at(2)
    world.rot(2)
    assert world.advance(mirror, 3).counts.repaired_tiles == 1
    assert world.holds(3)


def test_a_torn_tile_whose_slot_is_lost_is_fetched_alone(world: World) -> None:
    world.mirror_at(0)
    kill_puller(world, target=2, spec="weights.mirror.tile_torn=kill@1")
    slots = world.folder / "mirror" / "journal" / "slots"
    slots.write_bytes(bytes(slots.stat().st_size))
    mirror = world.mirror()
    assert mirror.version is None
    counts = world.advance(mirror, 2).counts
    assert counts.repaired_tiles >= 1
    assert counts.snapshots_fetched == 0
    assert world.holds(2)


def test_damage_that_cannot_be_mended_now_is_later(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = world.mirror_at(1)
    world.rot(0)
    monkeypatch.setattr(world.store, "get_range", lambda key, **_: lost(key))
    with pytest.raises(Unavailable):
        mirror.advance(world.store, world.log(), target=2)
    assert (mirror.version, mirror.try_hold()) == (None, None)
    assert mirror.damage is not None
    assert (mirror.damage.version, mirror.damage.tensor, mirror.damage.tile) == (1, TENSOR, 0)
    monkeypatch.undo()
    world.advance(mirror, 2)
    assert world.holds(2)


def test_when_everything_rotted_no_more_is_fetched_than_by_a_new_beginning(world: World) -> None:
    world.mirror_at(1)
    for tile in range(3):
        world.rot(tile)
    mirror = world.mirror_at(2)
    paths = [world.log().record(0).offered_snapshot, *(r.deltas[0].parts for r in world.log().records[1:])]
    assert mirror.counts.fetched_bytes <= sum(part.size_bytes for path in paths for part in path or ())
    assert world.holds(2)


def commit_wrong(world: World, *, context: bool, snapshot: bool = False) -> None:
    """A version whose parts are sound and lead to another model than its manifest says."""
    after = stepped(world.models[2], 9)
    promised = copied(after)
    promised["model.norm"][3] = -promised["model.norm"][3]
    parts = encode_delta(world.models[2], after, context=context, part_bytes=PART_BYTES)
    right = encode_snapshot(promised, part_bytes=PART_BYTES) if snapshot else []
    world.commit(promised, delta=parts, snapshot=right)


def test_a_version_that_comes_out_wrong_is_taken_back(world: World) -> None:
    """A path of RICE tells the path back; one with contexts is undone from the store."""
    commit_wrong(world, context=world.context)
    mirror = world.mirror_at(2)
    with pytest.raises(VerificationFailed) as caught:
        mirror.advance(world.store, world.log(), target=3)
    assert (caught.value.version, caught.value.tensor) == (3, "model.norm")
    assert (mirror.counts.repair_bytes > 0) is world.context
    assert mirror.version == 2
    assert world.holds(2)


def test_a_version_that_comes_out_wrong_is_gone_around_by_its_snapshot(world: World) -> None:
    commit_wrong(world, context=True, snapshot=True)
    mirror = world.mirror_at(2)
    result = world.advance(mirror, 3)
    assert result.rejected == {Edge(version=3, base_version=2)}
    assert (result.base_version, mirror.counts.repair_bytes) == (2 if result.base_version else None, 0)
    assert world.holds(3)


def test_a_puller_waits_for_whoever_loads_and_says_so_in_the_end(world: World) -> None:
    mirror = world.mirror_at(0)
    with mirror.hold() as held:
        with pytest.raises(MirrorBusy, match=r"loading from .* for 0 s; end it, or raise lock_patience_s"):
            mirror.advance(world.store, world.log(), target=1)
        assert held.version == 0
        assert same_model(mirror.load(), world.models[0])
    assert world.advance(mirror, 1).counts.fetched_bytes == 0
    assert world.holds(1)


def test_what_was_prefetched_is_applied_without_the_store(world: World) -> None:
    mirror = world.mirror_at(0)
    with mirror.hold():
        assert mirror.prefetch(world.store, world.log(), target=2).deltas_fetched == 2
    assert world.holds(0)
    for part in world.log().record(2).deltas[0].parts:
        overwrite(world.store, part.key, b"gone")
    assert world.advance(mirror, 2).counts.fetched_bytes == 0
    assert world.holds(2)


def test_a_failure_while_applying_leaves_nobody_loading(world: World) -> None:
    mirror = world.mirror_at(0)
    with armed("weights.mirror.tile=raise@2"), pytest.raises(FailpointRaised):
        mirror.advance(world.store, world.log(), target=1)
    assert (mirror.version, mirror.try_hold()) == (None, None)
    world.advance(mirror, 1)
    assert mirror.counts.snapshots_fetched == 1, "the first one"
    assert world.holds(1)


def test_random_rot_is_always_found(world: World) -> None:
    draw = random.Random(7)
    world.mirror_at(2)
    good = world.weights.read_bytes()
    for _ in range(5):
        with world.weights.open("r+b") as file:
            file.seek(draw.randrange(len(good)))
            file.write(draw.randbytes(9))
        world.mirror_at(2)
        assert world.weights.read_bytes() == good
