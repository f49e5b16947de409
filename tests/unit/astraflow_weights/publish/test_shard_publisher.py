"""Versions published by two processes, each with its own shards: the same bits as by one, in all orders."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from astraflow.errors import ConflictError, InternalError, UnavailableError
from astraflow_kit import failpoints
from astraflow_kit.failpoints import FailpointRaised
from astraflow_weights import errors, settings
from astraflow_weights.codec.parts.reader import open_part
from astraflow_weights.codec.tensors import Array
from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.publish.version_writer import CommittedVersion
from support.armed import armed
from support.published_models import pulled, rank_publisher, read_log, steps
from support.rank_threads import ThreadRanks, run_ranks
from support.weight_models import FaultyStore, Models, make_model, same_model, split_model

SETTINGS = settings.PublishSettings(upload_threads=1, snapshot_chain_ratio=100)
open_publisher = partial(rank_publisher, settings=SETTINGS)


@pytest.fixture(scope="module")
def chain() -> Models:
    """A model and what training makes of it in three steps."""
    return steps(4, density=0.05)


def publish_all(
    store: FaultyStore,
    chain: Mapping[int, Mapping[str, Array]],
    *,
    size: int,
    epoch: int = 1,
    base: Mapping[str, Array] | None = None,
) -> list[CommittedVersion]:
    """Publish the models of `steps` from `size` processes; what the first one was told."""
    shards = {step: split_model(model, size) for step, model in chain.items()}
    bases = split_model(base, size) if base is not None else [None] * size

    def publish(ranks: ThreadRanks) -> list[CommittedVersion]:
        publisher = open_publisher(store, ranks, epoch=epoch, base=bases[ranks.index])
        return [publisher.publish(parts[ranks.index], step=step) for step, parts in shards.items()]

    first, *others = run_ranks(size, publish)
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_mirror_has_the_same_bits_from_any_number_of_processes(
    store: FaultyStore, tmp_path: Path, chain: Models, size: int
) -> None:
    committed = publish_all(store, dict(enumerate(chain)), size=size)
    assert [(made.version, made.step, made.existed) for made in committed] == [
        (n, n, False) for n in range(4)
    ]
    for version, model in enumerate(chain):
        assert same_model(pulled(store, version), model)
    alone = publish_all(FaultyStore(tmp_path / "alone"), dict(enumerate(chain)), size=1)
    for made, by_one in zip(committed, alone, strict=True):
        assert (made.model_root, made.num_changed) == (by_one.model_root, by_one.num_changed)


@pytest.mark.parametrize("size", [1, 2])
def test_without_deltas_every_version_is_a_whole_model(
    store: FaultyStore, tmp_path: Path, chain: Models, size: int
) -> None:
    parts = [split_model(model, size) for model in chain]

    def publish(ranks: ThreadRanks) -> list[CommittedVersion]:
        publisher = open_publisher(store, ranks, deltas=False, inline_snapshots=False)
        return [publisher.publish(shards[ranks.index], step=step) for step, shards in enumerate(parts)]

    made, *_ = run_ranks(size, publish)
    assert all(version.snapshot_bytes and not version.delta_bytes for version in made)
    mirror, log = Mirror(tmp_path / "mirror"), read_log(store)
    for version, model in enumerate(chain):
        mirror.advance(store, log, target=version)
        assert same_model(mirror.load(), model)
    assert mirror.counts.snapshots_fetched == len(chain)


def test_each_process_uploads_its_own_parts_and_no_more(store: FaultyStore, chain: Models) -> None:
    """Both processes' parts are in the manifest, each with the tiles of its own shards alone."""
    before, after, *_ = chain
    publish_all(store, {0: before, 1: after}, size=2)
    log = read_log(store)
    (delta,) = log.record(1).deltas
    first, second = (open_part(store.get(ref.key)) for ref in delta.parts)
    assert [(part.head.writer, part.head.writers, part.head.number) for part in (first, second)] == [
        (0, 2, 0),
        (1, 2, 0),
    ]
    schema = log.manifest(1).schema
    for index, part in enumerate((first, second)):
        mine = split_model(after, 2)[index]
        ranges = {name: (shard.start, shard.stop) for name, shard in mine.shards.items()}
        held = {name for name, (start, stop) in ranges.items() if start < stop}
        assert {tile.spec.name for tile in part.tiles(schema)} <= held
        for tile in part.tiles(schema):
            start, stop = ranges[tile.spec.name]
            assert start <= tile.start < tile.start + tile.num_elements <= stop


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_a_delta_fits_on_a_base_from_another_number_of_processes(
    store: FaultyStore, chain: Models, before: int, after: int
) -> None:
    publish_all(store, {0: chain[0], 1: chain[1]}, size=before)
    committed = publish_all(store, {2: chain[2], 3: chain[3]}, size=after, epoch=2, base=chain[1])
    assert [version.version for version in committed] == [2, 3]
    assert all(version.delta_bytes and not version.snapshot_bytes for version in committed)
    assert same_model(pulled(store, 3), chain[3])


def test_the_same_step_and_bytes_by_fewer_processes_is_one_version(store: FaultyStore, chain: Models) -> None:
    first, second, *_ = chain
    publish_all(store, {0: first, 1: second}, size=2)
    (again,) = publish_all(store, {1: second}, size=1, epoch=2, base=second)
    assert (again.version, again.existed) == (1, True)
    assert len(read_log(store).records) == 2


def test_nobody_receives_a_models_bytes(store: FaultyStore) -> None:
    """What travels at a time is a shard of one tensor, or a message about it; never the model, nor its parts."""
    draw = np.random.default_rng(0)
    model = {f"layer.{index}": draw.integers(0, 2**16, (64, 64)).astype(np.uint16) for index in range(8)}
    parts = split_model(model, 2)

    def publish(ranks: ThreadRanks) -> tuple[int, int]:
        publisher = open_publisher(store, ranks)
        publisher.publish(parts[ranks.index], step=0)
        return ranks.most_bytes_received, ranks.most_bytes_seen

    total = sum(array.nbytes for array in model.values())
    for received, seen in run_ranks(2, publish):
        assert received == total // 16
        assert seen < total // 16


def test_a_failed_upload_of_one_process_is_everybodys_and_is_repeated(tmp_path: Path, chain: Models) -> None:
    first, second, *_ = chain
    stores = [FaultyStore(tmp_path / "store") for _ in range(2)]
    parts = [split_model(model, 2) for model in (first, second)]

    def publish(ranks: ThreadRanks) -> CommittedVersion:
        publisher = open_publisher(stores[ranks.index], ranks)
        publisher.publish(parts[0][ranks.index], step=0)
        stores[1].lose_before = 1
        with pytest.raises(UnavailableError) as raised:
            publisher.publish(parts[1][ranks.index], step=1)
        assert isinstance(raised.value, errors.Unavailable) is (ranks.index == 1)
        assert len(read_log(stores[0]).records) == 1
        return publisher.publish(parts[1][ranks.index], step=1)

    assert [version.version for version in run_ranks(2, publish)] == [1, 1]
    assert same_model(pulled(stores[0], 1), second)


@pytest.mark.parametrize("window", ["weights.publish.uploading", "weights.publish.parts_uploaded"])
def test_a_publication_that_ends_among_its_uploads_leaves_no_version(
    store: FaultyStore, tmp_path: Path, chain: Models, window: str
) -> None:
    first, second, *_ = chain
    publish_all(store, {0: first}, size=2)
    log = tmp_path / "failpoints.log"
    # The second part of the delta, or the commit after both.
    spec = f"{window}=raise@{2 if window.endswith('uploading') else 1}"
    refused = pytest.raises((FailpointRaised, InternalError), match="raised as armed")
    with armed(spec, log_path=log), refused:
        publish_all(store, {1: second}, size=2, epoch=2, base=first)
    assert [hit.acted for hit in failpoints.read_hits(log)][-1]
    assert len(read_log(store).records) == 1
    publish_all(store, {1: second}, size=2, epoch=3, base=first)
    assert same_model(pulled(store, 1), second)


def test_a_base_that_is_not_the_newest_version_is_refused_by_all(store: FaultyStore, chain: Models) -> None:
    first, second, *_ = chain
    publish_all(store, {0: first, 1: second}, size=2)

    def refused(ranks: ThreadRanks) -> None:
        with pytest.raises(ConflictError, match=r"not the newest version in the log \(1\)"):
            open_publisher(store, ranks, epoch=2, base=split_model(first, 2)[ranks.index])

    run_ranks(2, refused)


def test_assets_are_sent_by_the_first_process_alone(store: FaultyStore, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    parts = split_model(make_model(), 2)

    def publish(ranks: ThreadRanks) -> CommittedVersion:
        assets = [config] if ranks.index == 0 else []
        return open_publisher(store, ranks, assets=assets).publish(parts[ranks.index], step=0)

    run_ranks(2, publish)
    assert [asset.file_name for asset in read_log(store).manifest(0).assets] == ["config.json"]
