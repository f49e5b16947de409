"""Fused and stacked parameters, on any number of ranks, make exactly the tensors of the whole model."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow_trainer.model.hf_layout import (
    HeldTensor,
    ModelLayout,
    ParameterLayout,
    alike,
    fused,
    held_tensors,
    stacked,
)
from astraflow_weights.codec import tensor_hash, tensors
from astraflow_weights.codec.shards import Shard, ShardedModel, check_cover, sharded_digests
from support.rank_threads import ThreadRanks, run_ranks


@st.composite
def layouts(draw: st.DrawFn) -> ModelLayout:
    """A model of plain, fused, interleaved and stacked parameters."""
    width = draw(st.integers(1, 3))
    parameters: list[ParameterLayout] = [alike("norm", (draw(st.integers(1, 5)),))]
    for number in range(draw(st.integers(1, 3))):
        groups = draw(st.sampled_from([1, 2]))
        rows = [(f"qkv{number}.{part}", groups * draw(st.integers(1, 3))) for part in "qkv"]
        parameters.append(fused(f"qkv{number}", (sum(r for _, r in rows), width), rows, groups=groups))
    experts, inner = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    parameters.append(
        stacked(
            "experts.gate_up",
            (experts, 2 * inner, width),
            [[(f"experts.{e}.{part}", inner) for part in ("gate", "up")] for e in range(experts)],
        )
    )
    return ModelLayout(parameters)


def whole_tensors(layout: ModelLayout, values: Mapping[str, tensors.Array]) -> dict[str, tensors.Array]:
    """The tensors by the runs of the map, one element at a time."""
    found = {spec.name: np.zeros(spec.num_elements, np.uint16) for spec in layout.specs}
    for parameter in layout.parameters:
        for run in parameter.runs:
            for offset in range(run.count):
                found[run.tensor][run.tensor_start + offset] = values[parameter.name][run.start + offset]
    return {spec.name: found[spec.name].reshape(spec.shape) for spec in layout.specs}


def row_ranges(parameter: ParameterLayout, *, ranks: int) -> list[tuple[int, int]]:
    """Rows spread as FSDP does: ceil(rows / ranks) each, the last ranks fewer or none."""
    rows, row = parameter.shape[0], math.prod(parameter.shape[1:])
    chunk = math.ceil(rows / ranks)
    borders = [min(rank * chunk, rows) * row for rank in range(ranks + 1)]
    return list(itertools.pairwise(borders))


def held_by(
    layout: ModelLayout, values: Mapping[str, tensors.Array], *, rank: int, ranks: int
) -> tuple[dict[str, HeldTensor], ShardedModel]:
    """One rank's part of the tensors, copied as the trainer copies it."""
    ranges = {item.name: row_ranges(item, ranks=ranks)[rank] for item in layout.parameters}
    local = {name: values[name][start:stop] for name, (start, stop) in ranges.items()}
    held = held_tensors(layout, ranges)
    shards = {
        name: Shard(
            start=item.start,
            elements=np.concatenate([local[source][at : at + count] for source, at, count in item.sources]),
        )
        for name, item in held.items()
    }
    return held, ShardedModel(specs=layout.specs, shards=shards)


@settings(max_examples=40, deadline=None)
@given(layout=layouts(), ranks=st.integers(1, 4), seed=st.integers(0, 99))
def test_digests_of_ranks_are_those_of_the_whole_model(layout: ModelLayout, ranks: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    sizes = {item.name: math.prod(item.shape) for item in layout.parameters}
    values = {name: generator.integers(0, 2**16, size, np.uint16) for name, size in sizes.items()}
    expected = whole_tensors(layout, values)

    def digests(rank: ThreadRanks) -> object:
        _, model = held_by(layout, values, rank=rank.index, ranks=ranks)
        return sharded_digests(model, cover=check_cover(model, peers=rank), peers=rank)

    assert run_ranks(ranks, digests) == [tensor_hash.tensor_digests(expected)] * ranks
    for name, tensor in expected.items():
        parts = [held_by(layout, values, rank=rank, ranks=ranks)[1].shards.get(name) for rank in range(ranks)]
        held = np.concatenate([part.elements for part in parts if part is not None])
        assert np.array_equal(held, tensor.reshape(-1))


def test_queries_keys_and_values_of_one_head_that_stand_together_come_apart() -> None:
    layout = ModelLayout([fused("qkv", (8, 1), [("q", 4), ("k", 2), ("v", 2)], groups=2)])
    values = {"qkv": np.array([0, 1, 20, 30, 2, 3, 21, 31], np.uint16)}
    found = {name: tensor.reshape(-1).tolist() for name, tensor in whole_tensors(layout, values).items()}
    assert found == {"q": [0, 1, 2, 3], "k": [20, 21], "v": [30, 31]}


def _pieces(count: int, *, size: int = 1) -> list[ParameterLayout]:
    """Parameters piece0, piece1, … of `size` elements each, which are the tensor `whole` in this order."""
    whole = alike("whole", (count * size,))
    (run,) = whole.runs
    runs = [replace(run, count=size, tensor_start=number * size) for number in range(count)]
    return [
        ParameterLayout(name=f"piece{number}", shape=(size,), runs=(part,), tensors=whole.tensors)
        for number, part in enumerate(runs)
    ]


def test_a_tensor_may_be_put_together_from_two_parameters() -> None:
    held = held_tensors(ModelLayout(_pieces(2, size=2)), {"piece0": (0, 2), "piece1": (0, 2)})
    assert held["whole"] == HeldTensor(start=0, count=4, sources=(("piece0", 0, 2), ("piece1", 0, 2)))


def test_what_is_no_range_of_a_tensor_cannot_be_held() -> None:
    layout = ModelLayout([fused("qkv", (4, 1), [("q", 2), ("k", 2)], groups=2)])
    with pytest.raises(ValueError, match=r"holds elements up to 1 and from 2 on of tensor 'whole'"):
        held_tensors(ModelLayout(_pieces(3)), {"piece0": (0, 1), "piece1": (0, 0), "piece2": (0, 1)})
    assert held_tensors(layout, {"qkv": (1, 3)})["q"].start == 1


BAD_MAPS = [
    ([alike("a", (2, 0))], "gives? 0 elements of tensor 'a'"),
    ([alike("a", (2,)), fused("b", (2,), [("a", 2)])], "element 2 of tensor 'a' comes from no"),
    (_pieces(3)[1:], "element 0 of tensor 'whole' comes from no"),
    (_pieces(3)[:2], "parameters give 2 elements of tensor 'whole'"),
]


@pytest.mark.parametrize(("parameters", "complaint"), BAD_MAPS)
def test_a_map_with_gaps_or_overlaps_is_refused(parameters: list[ParameterLayout], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        ModelLayout(parameters)


def test_rows_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match="has 6 elements; its tensors have 4"):
        fused("qkv", (3, 2), [("q", 1), ("k", 1)])
    with pytest.raises(ValueError, match="3 rows of 'q' cannot be spread over 2 groups"):
        fused("qkv", (6, 2), [("q", 3), ("k", 3)], groups=2)
    with pytest.raises(ValueError, match=r"shape \(2, 3, 1\) cannot hold 2 experts of \[2\] rows"):
        stacked("experts", (2, 3, 1), [[("a", 2)], [("b", 2)]])
