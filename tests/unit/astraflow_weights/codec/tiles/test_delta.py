"""Each encoding of a delta tile is exact, chosen when it is smallest, and refuses contradictions."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from astraflow_weights.codec import Array, CorruptPart, kernel, tensors
from astraflow_weights.codec.kernel import Isa
from astraflow_weights.codec.tiles import delta, grid
from support.weight_models import gaussian_bf16

DTYPES = {np.uint8: "uint8", np.uint16: "bfloat16", np.uint32: "float32"}


@pytest.fixture(params=[None, Isa.AVX512], ids=["numpy", "kernel"], autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[None]:
    with kernel.using(request.param):
        yield


def encode(base: Array, target: Array, *, context: bool = False) -> grid.StoredTile:
    """The tile as it is read back from a part."""
    tile = delta.encode_tile(base, target, start=0, context=context)
    assert tile is not None
    spec = tensors.TensorSpec(name="w", dtype=DTYPES[base.dtype.type], shape=base.shape)
    return grid.StoredTile(**{**vars(tile), "spec": spec, "cell": 0, "body": memoryview(tile.body)})


def decoded(tile: grid.StoredTile, base: Array) -> Array:
    """What the tile makes of its base."""
    mirror = base.copy()
    delta.decode_tile(tile, base=mirror).apply_to(mirror)
    return mirror


def sparse_pair(gaps: list[int], *, dtype: type = np.uint16, step: int = 1) -> tuple[Array, Array]:
    positions = np.cumsum(np.array(gaps) + 1) - 1
    base = np.random.default_rng(0).integers(0, 200, positions[-1] + 7).astype(dtype)
    target = base.copy()
    target[positions] += np.array(step % (1 << 8 * base.itemsize)).astype(dtype)
    return base, target


def moved(base: Array, seed: int, *, density: float) -> Array:
    """The tile after a step: mostly one unit in the last place, sometimes several."""
    draw = np.random.default_rng(seed)
    steps = draw.choice(
        np.array([1, 0xFFFF, 2, 0xFFFD, 300], np.uint16), base.size, p=[0.4, 0.4, 0.1, 0.08, 0.02]
    )
    return base + np.where(draw.random(base.size) < density, steps, np.uint16(0))


@given(
    dtype=st.sampled_from(list(DTYPES)),
    size=st.integers(1, 700),
    density=st.floats(0, 1),
    seed=st.integers(0, 2**32),
    context=st.booleans(),
)
@example(dtype=np.uint16, size=1, density=1.0, seed=0, context=True)
@example(dtype=np.uint32, size=513, density=0.0, seed=0, context=False)
def test_any_difference_comes_back(dtype: type, size: int, density: float, seed: int, context: bool) -> None:
    draw = np.random.default_rng(seed)
    base = draw.integers(0, np.iinfo(dtype).max, size, dtype=dtype, endpoint=True)
    target = np.where(
        draw.random(size) < density, draw.integers(0, np.iinfo(dtype).max, size, dtype=dtype), base
    )
    if np.array_equal(base, target):
        assert delta.encode_tile(base, target, start=0, context=context) is None
        return
    tile = encode(base, target, context=context)
    assert np.array_equal(decoded(tile, base), target)
    assert tile.num_changed == np.count_nonzero(base != target)


@given(size=st.integers(1, 3000), density=st.floats(0, 1), seed=st.integers(0, 2**32), context=st.booleans())
def test_steps_of_training_come_back(size: int, density: float, seed: int, context: bool) -> None:
    base = gaussian_bf16(np.random.default_rng(seed), (size,))
    target = moved(base, seed, density=density)
    target[-1] += np.uint16(1)
    assert np.array_equal(decoded(encode(base, target, context=context), base), target)


@pytest.mark.parametrize("context", [False, True])
@pytest.mark.parametrize(
    "gaps", [[0], [254], [255], [256], [509, 510], [0, 65_535], [65_536], [3] * 9 + [200_000]]
)
def test_gaps_of_every_width_come_back(gaps: list[int], context: bool) -> None:
    base, target = sparse_pair(gaps * 3, step=-1)
    assert np.array_equal(decoded(encode(base, target, context=context), base), target)


@pytest.mark.parametrize("step", [1, -1, 2, 255, 0x7FFF, -0x7FFF, 0x8000])
def test_steps_of_every_size_come_back(step: int) -> None:
    base, target = sparse_pair([5, 0, 90], step=step)
    assert np.array_equal(decoded(encode(base, target), base), target)


def test_the_smallest_encoding_is_chosen() -> None:
    draw = np.random.default_rng(3)
    base = gaussian_bf16(draw, (20_000,))
    few = moved(base, 1, density=0.02)
    noise = draw.integers(0, 2**16, base.size).astype(np.uint16)
    assert delta.encode_tile(base, base, start=0, context=False) is None
    chosen = [encode(base, target).codec for target in (few, noise)]
    assert chosen == [grid.TileCodec.RICE, grid.TileCodec.RAW]


def test_a_context_is_used_where_it_is_smaller() -> None:
    base = gaussian_bf16(np.random.default_rng(0), (400_000,))
    exponents = (base >> 7).astype(np.int64) & 0xFF
    likely = np.random.default_rng(1).random(base.size) < 0.3 * 0.5 ** np.clip(
        exponents - np.median(exponents) + 4, 0, 40
    )
    target = base + likely.astype(np.uint16)
    plain, context = encode(base, target), encode(base, target, context=True)
    assert (plain.codec, context.codec) == (grid.TileCodec.RICE, grid.TileCodec.RICE_CTX)
    assert len(context.body) < 0.9 * len(plain.body)
    assert encode(base[:300], target[:300], context=True).codec is grid.TileCodec.RICE


def test_one_step_costs_what_its_entropy_is() -> None:
    draw = np.random.default_rng(5)
    base = draw.integers(0, 2**16, 400_000).astype(np.uint16)
    target = base.copy()
    changed = np.flatnonzero(draw.random(base.size) < 0.01)
    target[changed] += draw.choice(np.array([1, 0xFFFF], dtype=np.uint16), len(changed))
    density = len(changed) / base.size
    mask = -(density * np.log2(density) + (1 - density) * np.log2(1 - density)) / density
    assert 8 * len(encode(base, target).body) / len(changed) < 1.02 * (mask + 1)


@pytest.mark.parametrize(
    "change",
    [
        {"num_changed": 2},
        {"num_changed": 0},
        {"num_elements": 300},
        {"codec": grid.TileCodec.RAW},
        {"codec": grid.TileCodec.EXP_PLANE},
        {"codec": grid.TileCodec.XOR_ZSTD},
        {"body": memoryview(b"")},
        {"spec": tensors.TensorSpec(name="w", dtype="uint8", shape=(322,))},
    ],
)
def test_a_tile_that_contradicts_itself_is_refused(change: dict[str, object]) -> None:
    base, target = sparse_pair([4, 9, 300])
    tile = replace(encode(base, target), **change)  # type: ignore[arg-type]
    with pytest.raises(CorruptPart):
        delta.decode_tile(tile, base=base[: tile.num_elements])


@pytest.mark.parametrize(
    ("other_base", "message"),
    [(None, "cannot stand"), (np.zeros(40_000, np.uint16), "class does not have in this base")],
    ids=["without", "another"],
)
def test_a_tile_with_context_is_not_read_without_its_own_base(other_base: Array | None, message: str) -> None:
    base = gaussian_bf16(np.random.default_rng(0), (40_000,))
    exponents = (base >> 7).astype(np.int64) & 0xFF
    target = base + (exponents == np.median(exponents)).astype(np.uint16)
    tile = encode(base, target, context=True)
    assert tile.codec is grid.TileCodec.RICE_CTX
    with pytest.raises(CorruptPart, match=message):
        delta.decode_tile(tile, base=other_base)


@given(
    body=st.binary(max_size=120),
    codec=st.sampled_from(grid.TileCodec),
    num_changed=st.integers(0, 60),
    first=st.integers(0, 255),
    dtype=st.sampled_from([np.uint16, np.uint32]),
)
def test_random_bodies_raise_nothing_but_corrupt_part(
    body: bytes, codec: grid.TileCodec, num_changed: int, first: int, dtype: type
) -> None:
    base = np.zeros(50, dtype)
    something = encode(base, base + 1)
    tile = replace(
        something, codec=codec, body=memoryview(body), num_changed=num_changed, first_exponent=first
    )
    try:
        delta.decode_tile(tile, base=base).apply_to(base)
    except CorruptPart:
        assert not base.any()
