"""Digests of a model that nobody holds as a whole, and covers that are wrong."""

from collections.abc import Sequence

import numpy as np
import pytest

from astraflow_weights.codec import peers, shards
from astraflow_weights.codec.shards import Shard, ShardedModel, check_cover, sharded_digests, whole
from astraflow_weights.codec.tensor_hash import tensor_digests
from support import rank_threads, weight_models


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("chunk_bytes", [64, shards.CHUNK_BYTES])
def test_digests_do_not_depend_on_how_a_model_is_spread(
    size: int, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "CHUNK_BYTES", chunk_bytes)
    model = weight_models.make_model()
    parts = weight_models.split_model(model, size)

    def digests(ranks: rank_threads.ThreadRanks) -> object:
        cover = check_cover(parts[ranks.index], peers=ranks)
        return sharded_digests(parts[ranks.index], cover=cover, peers=ranks)

    assert rank_threads.run_ranks(size, digests) == [tensor_digests(model)] * size


def test_a_whole_model_is_held_by_one_process() -> None:
    model = weight_models.make_model()
    held = whole(model)
    assert held.num_bytes == sum(array.nbytes for array in model.values())
    cover = check_cover(held, peers=peers.OnePeer())
    assert sharded_digests(held, cover=cover, peers=peers.OnePeer()) == tensor_digests(model)


def test_chunks_bound_what_a_process_receives_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "CHUNK_BYTES", 256)
    parts = weight_models.split_model({"w": np.arange(4096, dtype=np.uint16)}, 2)

    def most_received(ranks: rank_threads.ThreadRanks) -> int:
        cover = check_cover(parts[ranks.index], peers=ranks)
        sharded_digests(parts[ranks.index], cover=cover, peers=ranks)
        return ranks.most_bytes_received

    assert rank_threads.run_ranks(2, most_received) == [256, 0]


def test_only_what_the_largest_holder_lacks_travels_for_a_digest() -> None:
    """One tensor lies on the second process alone, of the other the first one holds a quarter."""
    model = {"alone": np.arange(500, dtype=np.uint16), "spread": np.arange(400, dtype=np.uint16)}
    specs = whole(model).specs
    first = {"spread": Shard(start=0, elements=model["spread"][:100])}
    second = {
        "alone": Shard(start=0, elements=model["alone"]),
        "spread": Shard(start=100, elements=model["spread"][100:]),
    }

    def digests(ranks: rank_threads.ThreadRanks) -> tuple[object, int]:
        held = ShardedModel(specs=specs, shards=(first, second)[ranks.index])
        found = sharded_digests(held, cover=check_cover(held, peers=ranks), peers=ranks)
        return found, ranks.bytes_received

    assert rank_threads.run_ranks(2, digests) == [(tensor_digests(model), 0), (tensor_digests(model), 200)]


@pytest.mark.parametrize(
    ("ranges", "complaint"),
    [
        ([(0, 3), (4, 8)], r"process 1 holds elements \[4, 8\) of 'w'; expected is a range that begins at 3"),
        ([(0, 5), (4, 8)], "expected is a range that begins at 5"),
        ([(4, 8), (0, 4)], "process 0 holds elements"),
        ([(0, 4), (4, 7)], "shards end at element 7 of 8 of 'w'"),
        ([(0, 4), (4, 9)], "ends within 8"),
    ],
)
def test_shards_that_make_no_model_are_refused(ranges: Sequence[tuple[int, int]], complaint: str) -> None:
    (spec,) = whole({"w": np.zeros(8, dtype=np.uint16)}).specs

    def check(ranks: rank_threads.ThreadRanks) -> None:
        start, stop = ranges[ranks.index]
        shard = Shard(start=start, elements=np.zeros(stop - start, dtype=np.uint16))
        check_cover(ShardedModel(specs=(spec,), shards={"w": shard}), peers=ranks)

    with pytest.raises(ValueError, match=complaint):
        rank_threads.run_ranks(2, check)
