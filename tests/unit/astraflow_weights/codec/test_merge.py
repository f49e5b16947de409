"""A merged delta is its members one after the other; a delta and its inverse are nothing."""

import functools
import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from astraflow_weights import codec, errors
from astraflow_weights.codec.delta import encode_delta_tiles
from astraflow_weights.codec.parts import reader, writer
from astraflow_weights.codec.tensors import Array
from astraflow_weights.codec.tiles.grid import PartKind, TileCodec
from support.published_models import steps
from support.weight_models import AWKWARD_BF16, applied, gaussian_bf16, same_model, split_model


def deltas(models: list[dict[str, Array]], *, context: bool = False) -> list[list[bytes]]:
    return [
        codec.encode_delta(before, after, context=context, base_version=number, target_version=number + 1)
        for number, (before, after) in enumerate(itertools.pairwise(models))
    ]


def mixed_chain(length: int, *, seed: int) -> list[dict[str, Array]]:
    """Versions in which tensors of every dtype move, the small bfloat16 ones more often than the large ones."""
    draw = np.random.default_rng(seed)
    models: list[dict[str, Array]] = [
        {
            "w": gaussian_bf16(draw, (20_000,)),
            "awkward": np.tile(AWKWARD_BF16, 9),
            "norm": draw.standard_normal(301).astype(np.float32),
            "scale": np.array(draw.standard_normal(), np.float32),
            "codes": draw.integers(0, 256, (7, 31), dtype=np.uint8),
            "empty": np.zeros((0, 3), np.float32),
        }
    ]
    for _ in range(length):
        before = models[-1]
        exponents = (before["w"] >> 7).astype(np.int64) & 0xFF
        moves = draw.choice(np.array([1, 0xFFFF, 3], np.uint16), 20_000)
        small = exponents < np.quantile(exponents, 0.1)
        bits = before["norm"].view(np.uint32) ^ draw.integers(0, 2**32, 301, dtype=np.uint32)
        models.append(
            {
                "w": before["w"] + np.where(small, moves, 0).astype(np.uint16),
                "awkward": np.roll(before["awkward"], 1),
                "norm": np.where(draw.random(301) < 0.3, bits, before["norm"].view(np.uint32)).view(
                    np.float32
                ),
                "scale": np.array(draw.standard_normal(), np.float32),
                "codes": before["codes"] ^ (draw.random((7, 31)) < 0.2).astype(np.uint8) * np.uint8(0x81),
                "empty": before["empty"],
            }
        )
    return models


def rank_split(
    before: dict[str, Array], after: dict[str, Array], *, ranks: int, number: int, context: bool
) -> list[bytes]:
    """The delta as so many ranks write it, each the tiles of its own rows."""
    head = writer.PartSetHead(kind=PartKind.DELTA, base_version=number, target_version=number + 1)
    held = zip(split_model(before, ranks), split_model(after, ranks), strict=True)
    return [
        part
        for rank, (base, target) in enumerate(held)
        for part in writer.write_parts(
            encode_delta_tiles(base, target, context=context),
            head=head,
            schema=codec.Schema.of_model(before),
            part_bytes=20_000,
            writer=rank,
            writers=ranks,
        )
    ]


@settings(max_examples=20)
@example(0, [(2, False), (4, False)])
@example(0, [(1, True), (1, True)])
@given(st.integers(0, 2**32), st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=4))
def test_deltas_of_any_codec_and_ranks_merge_and_invert(seed: int, written: list[tuple[int, bool]]) -> None:
    """Each delta of the chain by its own number of ranks, which have other borders, with or without RICE_CTX."""
    models = mixed_chain(len(written), seed=seed)
    members = [
        rank_split(models[number], models[number + 1], ranks=ranks, number=number, context=context)
        for number, (ranks, context) in enumerate(written)
    ]
    schema = codec.Schema.of_model(models[0])
    merged = codec.merge_deltas(members, schema=schema, base=models[0])
    one_by_one = functools.reduce(applied, members, models[0])
    assert same_model(one_by_one, models[-1])
    assert same_model(applied(models[0], merged), models[-1])
    back = codec.invert_delta(merged, schema=schema, base=models[0])
    assert same_model(applied(models[-1], back), models[0])
    for number in reversed(range(len(members))):
        back = codec.invert_delta(members[number], schema=schema, base=models[number])
        codec.apply_delta(one_by_one, back)
    assert same_model(one_by_one, models[0])


def test_the_mixed_chains_hold_what_they_are_for() -> None:
    models = mixed_chain(1, seed=0)
    parts = rank_split(models[0], models[1], ranks=3, number=0, context=True)
    assert {TileCodec.RICE_CTX, TileCodec.RAW} <= codecs(parts)
    assert TileCodec.RICE in codecs(rank_split(models[0], models[1], ranks=3, number=0, context=False))


def codecs(parts: list[bytes]) -> set[TileCodec]:
    return {found for part in parts for found in reader.open_part(part).codecs}


@settings(max_examples=20)
@given(st.integers(2, 7), st.integers(0, 2**32), st.floats(0, 1), st.integers(300, 5000))
def test_a_merge_is_its_members_one_by_one(length: int, seed: int, density: float, part_bytes: int) -> None:
    models = steps(length, seed=seed, density=density)
    merged = codec.merge_deltas(
        deltas(models), schema=codec.Schema.of_model(models[0]), part_bytes=part_bytes
    )
    assert same_model(applied(models[0], merged), models[-1])


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.floats(0, 1))
def test_a_delta_and_its_inverse_are_nothing(seed: int, density: float) -> None:
    base, target = steps(2, seed=seed, density=density)
    parts = codec.encode_delta(base, target, base_version=3, target_version=4)
    back = codec.invert_delta(parts, schema=codec.Schema.of_model(base))
    assert same_model(applied(target, back), base)
    assert back == codec.encode_delta(target, base, base_version=4, target_version=3)


def test_changes_that_cancel_out_vanish() -> None:
    base, target = steps(2)
    there = codec.encode_delta(base, target, base_version=1, target_version=2)
    back = codec.encode_delta(target, base, base_version=2, target_version=3)
    circle = codec.merge_deltas([there, back], schema=codec.Schema.of_model(base))
    assert codec.summarize_delta(circle).num_changed == 0
    assert codecs(circle) == set()


def test_merging_merges_is_merging_the_members() -> None:
    models = steps(5)
    members, schema = deltas(models), codec.Schema.of_model(models[0])
    halves = [codec.merge_deltas(half, schema=schema) for half in (members[:2], members[2:])]
    assert codec.merge_deltas(halves, schema=schema) == codec.merge_deltas(members, schema=schema)


def test_tiles_with_context_need_the_base() -> None:
    models = mixed_chain(1, seed=0)
    members, schema = deltas(models, context=True), codec.Schema.of_model(models[0])
    assert TileCodec.RICE_CTX in codecs(members[0])
    with pytest.raises(errors.NeedsBase, match="pass the model before the delta"):
        codec.merge_deltas(members, schema=schema)
    with pytest.raises(errors.NeedsBase):
        codec.invert_delta(members[0], schema=schema)


def test_a_chain_with_a_gap_is_refused() -> None:
    models = steps(4)
    members, schema = deltas(models), codec.Schema.of_model(models[0])
    with pytest.raises(ValueError, match="to version 1 is followed by one from version 2"):
        codec.merge_deltas([members[0], members[2]], schema=schema)
    with pytest.raises(ValueError, match="no deltas"):
        codec.merge_deltas([], schema=schema)


def test_deltas_and_bases_of_other_models_are_refused() -> None:
    other = codec.encode_delta({"w": np.zeros(3, np.uint16)}, {"w": np.ones(3, np.uint16)}, base_version=1)
    models = steps(2)
    schema = codec.Schema.of_model(models[0])
    (first,) = deltas(models)
    with pytest.raises(errors.CorruptPart, match="made for another model"):
        codec.merge_deltas([first, other], schema=schema)
    with pytest.raises(errors.ModelMismatch):
        codec.merge_deltas([first], schema=schema, base={"w": np.zeros(3, np.uint16)})
