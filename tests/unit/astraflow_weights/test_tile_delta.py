"""Each encoding of a delta tile is exact, chosen when it is smallest, and refuses contradictions."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from astraflow_weights.errors import CorruptPart
from astraflow_weights.tensors import Array, TensorSpec
from astraflow_weights.tile_delta import decode_tile, encode_tile
from astraflow_weights.tiles import EncodedTile, StoredTile, TileCodec

DTYPES = [np.uint8, np.uint16, np.uint32]


def stored(tile: EncodedTile) -> StoredTile:
    return StoredTile(
        spec=TensorSpec(name="w", dtype="bfloat16", shape=(tile.num_elements,)),
        start=tile.start,
        num_elements=tile.num_elements,
        codec=tile.codec,
        body=memoryview(tile.body),
        num_changed=tile.num_changed,
        params=tile.params,
        aux=tile.aux,
    )


def encode(base: Array, target: Array) -> StoredTile:
    return stored(encode_tile(base, target, start=0, context=False))


def sparse_pair(gaps: list[int], *, dtype: type, step: int = 1) -> tuple[Array, Array]:
    positions = np.cumsum(np.array(gaps) + 1) - 1
    base = np.random.default_rng(0).integers(0, 200, positions[-1] + 7).astype(dtype)
    target = base.copy()
    target[positions] += np.array(step % (1 << 8 * base.itemsize)).astype(dtype)
    return base, target


@given(
    dtype=st.sampled_from(DTYPES),
    size=st.integers(1, 700),
    density=st.floats(0, 1),
    seed=st.integers(0, 2**32),
)
@example(dtype=np.uint16, size=1, density=1.0, seed=0)
@example(dtype=np.uint32, size=513, density=0.0, seed=0)
def test_any_difference_comes_back(dtype: type, size: int, density: float, seed: int) -> None:
    draw = np.random.default_rng(seed)
    base = draw.integers(0, np.iinfo(dtype).max, size, dtype=dtype, endpoint=True)
    target = np.where(
        draw.random(size) < density, draw.integers(0, np.iinfo(dtype).max, size, dtype=dtype), base
    )
    tile = encode(base, target)
    mirror = base.copy()
    decode_tile(tile, base=mirror).add_to(mirror)
    assert np.array_equal(mirror, target)
    assert tile.num_changed == np.count_nonzero(base != target)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "gaps", [[0], [254], [255], [256], [509, 510], [0, 65_535], [65_536], [3] * 9 + [200_000]]
)
def test_gaps_of_every_width_come_back(gaps: list[int], dtype: type) -> None:
    base, target = sparse_pair(gaps * 3, dtype=dtype, step=-1)
    mirror = base.copy()
    decode_tile(encode(base, target), base=mirror).add_to(mirror)
    assert np.array_equal(mirror, target)


def test_the_smallest_encoding_is_chosen() -> None:
    draw = np.random.default_rng(3)
    base = draw.integers(0, 2**16, 20_000).astype(np.uint16)
    few, some = base.copy(), base.copy()
    few[::113] += 1
    some += draw.integers(0, 4, base.size).astype(np.uint16)
    noise = draw.integers(0, 2**16, base.size).astype(np.uint16)
    chosen = [encode(base, target).codec for target in (base, few, some, noise)]
    assert chosen == [TileCodec.ZERO, TileCodec.GAP_ZSTD, TileCodec.RAW_ZSTD, TileCodec.RAW]


def test_one_step_costs_about_what_the_gaps_cost() -> None:
    draw = np.random.default_rng(5)
    base = draw.integers(0, 2**16, 400_000).astype(np.uint16)
    target = base.copy()
    changed = np.flatnonzero(draw.random(base.size) < 0.01)
    target[changed] += draw.choice(np.array([1, 0xFFFF], dtype=np.uint16), len(changed))
    # Entropy of the positions at 1 % is 8.1 bits and of the sign 1 bit: 1.14 bytes.
    assert len(encode(base, target).body) / len(changed) < 1.3


@pytest.mark.parametrize(
    "change",
    [
        {"num_changed": 2},
        {"num_changed": 0},
        {"num_elements": 5},
        {"params": (9, 0, 0)},
        {"params": (1, 0, 0)},
        {"aux": 0},
        {"aux": 2**31},
        {"codec": TileCodec.RAW},
        {"codec": TileCodec.ZERO},
        {"codec": TileCodec.RAW_ZSTD},
        {"body": memoryview(b"")},
    ],
)
def test_a_gap_tile_that_contradicts_itself_is_refused(change: dict[str, object]) -> None:
    base, target = sparse_pair([4, 9, 300], dtype=np.uint16)
    tile = replace(encode(base, target), **change)  # type: ignore[arg-type]
    with pytest.raises(CorruptPart):
        decode_tile(tile, base=base[: tile.num_elements])


def test_a_change_beyond_the_tile_is_refused() -> None:
    base, target = sparse_pair([4, 9, 20], dtype=np.uint16)
    tile = replace(encode(base, target), num_elements=35)
    with pytest.raises(CorruptPart, match="changes element 35 of 35"):
        decode_tile(tile, base=base[:35])


def test_a_step_of_zero_is_refused() -> None:
    base, target = sparse_pair([4, 9, 300], dtype=np.uint8)
    tile = encode(base, target)
    zeroed = bytearray(tile.body)
    zeroed[-1] = 0
    with pytest.raises(CorruptPart, match="steps other than zero"):
        decode_tile(replace(tile, body=memoryview(zeroed)), base=base)


@given(
    body=st.binary(max_size=120),
    codec=st.sampled_from(TileCodec),
    num_changed=st.integers(0, 60),
    mode=st.integers(0, 3),
    aux=st.integers(0, 70),
)
def test_random_bodies_raise_nothing_but_corrupt_part(
    body: bytes, codec: TileCodec, num_changed: int, mode: int, aux: int
) -> None:
    base = np.zeros(50, dtype=np.uint16)
    tile = StoredTile(
        spec=TensorSpec(name="w", dtype="bfloat16", shape=(50,)),
        start=0,
        num_elements=50,
        codec=codec,
        body=memoryview(body),
        num_changed=num_changed,
        params=(mode, 0, 0),
        aux=aux,
    )
    try:
        decode_tile(tile, base=base).add_to(base)
    except CorruptPart:
        assert not base.any()
