"""Deltas are exact, compose and invert, and a bad one changes nothing."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow_weights.codec import delta, tensors
from astraflow_weights.codec.parts.writer import PartSetHead, write_parts
from astraflow_weights.codec.schema import Schema
from astraflow_weights.codec.tiles.delta import encode_tile
from astraflow_weights.codec.tiles.grid import PartKind
from astraflow_weights.errors import CorruptPart, ModelMismatch
from support.weight_models import applied, copied, make_model, same_model, trained

BASE = make_model()
TARGET = trained(BASE, 2, density=0.4)
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
arrays = st.tuples(shapes, st.sampled_from([np.uint16, np.uint8, np.float32]), st.integers(0, 2**32))


def random_array(shape: tuple[int, ...], dtype: type, seed: int) -> tensors.Array:
    """Random bits, so NaN payloads, infinities and denormals are all there."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    bits = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    return bits.view(dtype).reshape(shape)


@given(st.lists(arrays, min_size=1, max_size=5), st.floats(0, 1), st.integers(1, 400))
def test_applying_a_delta_gives_the_target_bit_by_bit(
    drawn: list[tuple[tuple[int, ...], type, int]], density: float, part_bytes: int
) -> None:
    base = {f"t{i}": random_array(*spec) for i, spec in enumerate(drawn)}
    target = copied(base)
    for i, (shape, dtype, seed) in enumerate(drawn):
        changed = np.random.default_rng(seed + 1).random(shape) < density
        target[f"t{i}"][...] = np.where(changed, random_array(shape, dtype, seed + 2), base[f"t{i}"])
    assert same_model(applied(base, delta.encode_delta(base, target, part_bytes=part_bytes)), target)


def test_parts_may_come_in_any_order() -> None:
    parts = delta.encode_delta(BASE, TARGET, part_bytes=50)
    assert len(parts) > 2
    assert same_model(applied(BASE, parts[::-1]), TARGET)


def test_summary_counts_what_changed() -> None:
    parts = delta.encode_delta(BASE, TARGET)
    summary = delta.summarize_delta(parts)
    assert summary.num_changed == sum(np.count_nonzero(BASE[name] != TARGET[name]) for name in BASE)
    assert summary.size_bytes == sum(map(len, parts))
    assert delta.summarize_delta(delta.encode_delta(BASE, copied(BASE))).num_changed == 0


def test_a_delta_is_refused_whole_when_only_its_last_tile_cannot_be_decoded() -> None:
    """The part is sealed correctly, so nothing but decoding the tile itself can find the fault."""
    base = {"a": np.arange(500, dtype=np.uint16), "b": np.arange(500, dtype=np.uint16)}
    schema = Schema.of_model(base)
    step = np.zeros(500, dtype=np.uint16)
    step[[3, 99, 400]] = 1
    good = encode_tile(base["a"], base["a"] + step, start=0, context=False)
    assert good is not None
    bad = replace(good, num_changed=2)
    tiles = [(schema.specs[0], good), (schema.specs[1], bad)]
    head = PartSetHead(kind=PartKind.DELTA)
    parts = list(write_parts(tiles, head=head, schema=schema, part_bytes=12))
    assert len(parts) == 2
    mirror = copied(base)
    with pytest.raises(CorruptPart, match="of 'b'"):
        delta.apply_delta(mirror, parts)
    assert same_model(mirror, base)


def test_a_part_missing_or_doubled_is_refused() -> None:
    parts = delta.encode_delta(BASE, TARGET, part_bytes=150)
    mirror = copied(BASE)
    for bad in (parts[:-1], parts[1:], [*parts, parts[0]], [*parts[:-1], parts[0]], []):
        with pytest.raises(CorruptPart):
            delta.apply_delta(mirror, bad)
    assert same_model(mirror, BASE)


def test_parts_of_two_versions_do_not_mix() -> None:
    first = delta.encode_delta(BASE, TARGET, part_bytes=150, target_version=1)
    second = delta.encode_delta(BASE, trained(BASE, 6, density=0.4), part_bytes=150, target_version=2)
    with pytest.raises(CorruptPart):
        applied(BASE, [*first[:-1], second[len(first) - 1]])


def test_a_delta_for_another_model_is_refused() -> None:
    parts = delta.encode_delta(BASE, TARGET)
    more = {**copied(BASE), "extra": np.zeros(3, np.uint16)}
    for other in (make_model(rows=25), more, {"w": copied(BASE)["model.norm"]}):
        before = copied(other)
        with pytest.raises(CorruptPart, match="another model"):
            delta.apply_delta(other, parts)
        assert same_model(other, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.new": np.zeros(2, np.uint16)}, "'model.new' was added"),
        ({"model.norm": None}, "'model.norm' was removed"),
        ({"model.norm": np.zeros(7, np.float32)}, r"'model.norm' was float32\[24\] and is float32\[7\]"),
        ({"model.norm": np.zeros(24, np.uint16)}, r"'model.norm' was float32\[24\] and is bfloat16\[24\]"),
        ({"model.norm": np.zeros((2, 12), np.float32)}, "publish this model as a new policy"),
        ({"model.scale": np.zeros(1, np.float32)}, "publish this model as a new policy"),
    ],
)
def test_another_architecture_is_a_new_policy(change: dict[str, tensors.Array | None], message: str) -> None:
    target = {name: array for name, array in {**BASE, **change}.items() if array is not None}
    with pytest.raises(ModelMismatch, match=message):
        delta.encode_delta(BASE, target)


def test_tied_weights_that_drift_apart_are_refused() -> None:
    shared = np.arange(50, dtype=np.uint16)
    target = {"embed": shared + np.uint16(1), "head": shared + np.uint16(2)}
    parts = delta.encode_delta({"embed": shared, "head": shared}, target)
    with pytest.raises(CorruptPart, match="shares its memory"):
        delta.apply_delta({"embed": shared, "head": shared}, parts)
    assert np.array_equal(shared, np.arange(50))


def test_arrays_that_cannot_be_changed_in_place_are_refused_before_any_write() -> None:
    base = {"a": np.arange(8, dtype=np.uint16), "b": np.arange(8, dtype=np.uint16)}
    parts = delta.encode_delta(base, {name: array + np.uint16(1) for name, array in base.items()})
    base["b"].flags.writeable = False
    with pytest.raises(ValueError, match="'b' cannot be changed in place"):
        delta.apply_delta(base, parts)
    assert np.array_equal(base["a"], np.arange(8))


def test_overlapping_arrays_are_refused() -> None:
    memory = np.arange(12, dtype=np.uint16)
    base = {"a": memory[:8], "b": memory[4:]}
    parts = delta.encode_delta({name: array.copy() for name, array in base.items()}, copied(base))
    with pytest.raises(ValueError, match="overlap"):
        delta.apply_delta(base, parts)


def test_other_dtypes_are_refused_with_the_remedy() -> None:
    model = {"w": np.zeros(3, np.float64)}
    with pytest.raises(ValueError, match="float64; pass uint16"):
        delta.encode_delta(model, model)


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.data())
def test_any_damage_is_detected_and_changes_nothing(seed: int, data: st.DataObject) -> None:
    base = make_model(seed)
    (part,) = delta.encode_delta(base, trained(base, seed, density=0.1))
    damaged = bytearray(part)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(part) - 1))] ^= data.draw(st.integers(1, 255))
    mirror = copied(base)
    if bytes(damaged) != part:
        with pytest.raises(CorruptPart):
            delta.apply_delta(mirror, [bytes(damaged)])
    assert same_model(mirror, base)
