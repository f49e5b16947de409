"""Every value and every size that a tensor can have survives deltas and snapshots, on every path of the codec."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from astraflow_weights.codec import (
    Schema,
    apply_delta,
    decode_snapshot,
    encode_delta,
    encode_snapshot,
    kernel,
)
from astraflow_weights.codec.kernel import Isa
from astraflow_weights.codec.parts.reader import open_part
from astraflow_weights.codec.tensors import MAX_TILE_ELEMENTS, Array
from astraflow_weights.codec.tiles.grid import TileCodec
from support.weight_models import applied, copied, gaussian_bf16, same_model

PATHS = (None, *Isa)
KINDS = [(path, context) for path in PATHS for context in (False, True)]
MODEL = dict[str, Array]


@pytest.fixture(params=KINDS, ids=[f"{path}-{'ctx' if context else 'rice'}" for path, context in KINDS])
def context(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether RICE_CTX is allowed; the path is switched for the test."""
    path, context = request.param
    with kernel.using(path):
        yield context


def there_and_back(base: MODEL, target: MODEL, *, context: bool) -> set[TileCodec]:
    """Apply the delta and the one back, and fold and unfold the target; returns the codecs of the delta."""
    parts = encode_delta(base, target, context=context)
    assert same_model(applied(base, parts), target)
    assert same_model(applied(target, encode_delta(target, base, context=context)), base)
    assert same_model(decode_snapshot(encode_snapshot(target), schema=Schema.of_model(target)), target)
    return {codec for part in parts for codec in open_part(part).codecs}


# Zeros, denormals, ones, the largest, infinities, quiet and signalling NaNs with payloads: each with both signs.
EDGES = np.array(
    [0, 1, 0x7F, 0x80, 0x3F80, 0x7F7F, 0x7F80, 0x7F81, 0x7FBF, 0x7FC0, 0x7FC1, 0x7FFF], np.uint16
)
BOTH_SIGNS = np.concatenate([EDGES, EDGES | np.uint16(0x8000)])


def test_every_edge_value_becomes_every_other(context: bool) -> None:
    """Few changes among many elements, so that the sparse codecs take them, and nothing but changes."""
    pairs = np.array(list(itertools.product(BOTH_SIGNS, BOTH_SIGNS)), np.uint16)
    base = gaussian_bf16(np.random.default_rng(0), (40_000,))
    target = base.copy()
    base[:: 40_000 // len(pairs)][: len(pairs)] = pairs[:, 0]
    target[:: 40_000 // len(pairs)][: len(pairs)] = pairs[:, 1]
    assert there_and_back({"w": base}, {"w": target}, context=context) <= {TileCodec.RICE, TileCodec.RICE_CTX}
    dense_base, dense_target = pairs.T.copy()
    there_and_back({"w": dense_base}, {"w": dense_target}, context=context)


def test_all_signs_flip(context: bool) -> None:
    base = {"w": gaussian_bf16(np.random.default_rng(1), (5_001,))}
    there_and_back(base, {"w": base["w"] ^ np.uint16(0x8000)}, context=context)


@pytest.mark.parametrize("density", [0.0, 0.001, 0.05, 0.5, 1.0])
@pytest.mark.parametrize("size", [1, 2, 31, 63, 64, 65, 127, 129, 4_095, 4_097])
def test_sizes_that_are_multiples_of_nothing(size: int, density: float, context: bool) -> None:
    draw = np.random.default_rng(size)
    base = gaussian_bf16(draw, (size,))
    moved = np.where(draw.random(size) < density, draw.choice([1, 0xFFFF, 700], size), 0)
    there_and_back({"w": base}, {"w": base + moved.astype(np.uint16)}, context=context)


@pytest.mark.slow
@pytest.mark.parametrize("more", [-1, 0, 1, MAX_TILE_ELEMENTS + 77])
def test_sizes_around_the_lines_of_the_tile_grid(more: int, context: bool) -> None:
    size = MAX_TILE_ELEMENTS + more
    base = np.arange(size, dtype=np.uint32).astype(np.uint16)
    target = base.copy()
    target[[0, 63, 64, 65, MAX_TILE_ELEMENTS - 65, MAX_TILE_ELEMENTS - 2, -1]] += np.uint16(1)
    there_and_back({"w": base}, {"w": target}, context=context)


def test_scalars_and_tensors_without_elements(context: bool) -> None:
    base: MODEL = {
        "bf16": np.array(0x3F80, np.uint16),
        "fp32": np.array(-0.0, np.float32),
        "fp8": np.array(7, np.uint8),
        "none": np.zeros((0,), np.uint16),
        "none32": np.zeros((3, 0, 2), np.float32),
        "none8": np.zeros((0, 0), np.uint8),
    }
    target = {
        **copied(base),
        "bf16": np.array(0x7FC1, np.uint16),
        "fp32": np.array(np.inf, np.float32),
        "fp8": np.array(255, np.uint8),
    }
    there_and_back(base, target, context=context)
    only_empty: MODEL = {"none": np.zeros((0, 4), np.uint16)}
    there_and_back(only_empty, only_empty, context=context)


def test_tensors_beside_the_bfloat16_ones_survive_bit_by_bit(context: bool) -> None:
    """float32 with all its NaNs, and fp8 as bytes."""
    draw = np.random.default_rng(3)
    bits = draw.integers(0, 2**32, 3_001, dtype=np.uint32)
    bits[:6] = [0x7F800001, 0xFFC00000, 0x80000000, 1, 0x7F800000, 0xFF7FFFFF]
    codes = np.arange(513).astype(np.uint8)
    base: MODEL = {"scale": bits.view(np.float32), "codes": codes, "w": gaussian_bf16(draw, (999,))}
    few = np.where(draw.random(3_001) < 0.02, 1, 0).astype(np.uint32)
    sparse: MODEL = {**base, "scale": (bits + few).view(np.float32), "codes": codes ^ np.uint8(1)}
    dense: MODEL = {**base, "scale": (~bits).view(np.float32), "codes": codes[::-1].copy()}
    for target in (sparse, dense):
        there_and_back(base, target, context=context)


def test_tied_weights_survive(context: bool) -> None:
    shared = gaussian_bf16(np.random.default_rng(4), (700,))
    moved = shared + (np.arange(700) % 9 == 0).astype(np.uint16)
    mirror = {"embed": shared.copy()}
    mirror["head"] = mirror["embed"]
    parts = encode_delta({"embed": shared, "head": shared}, {"embed": moved, "head": moved}, context=context)
    apply_delta(mirror, parts)
    assert same_model(mirror, {"embed": moved, "head": moved})
    assert mirror["head"] is mirror["embed"]
