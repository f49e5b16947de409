"""Snapshots give back every bit and unfold to no more than is allowed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow_weights.codec import CorruptPart, Schema, decode_snapshot, encode_delta, encode_snapshot
from support.weight_models import gaussian_bf16, make_model, same_model, trained


@given(st.integers(0, 2**32), st.integers(1, 5000))
def test_a_model_comes_back_bit_by_bit(seed: int, part_bytes: int) -> None:
    model = make_model(seed)
    assert same_model(
        decode_snapshot(encode_snapshot(model, part_bytes=part_bytes), schema=Schema.of_model(model)), model
    )


def test_weights_take_about_two_thirds_of_their_size() -> None:
    model = {"w": gaussian_bf16(np.random.default_rng(0), (1000, 1000))}
    assert sum(map(len, encode_snapshot(model))) < 0.72 * model["w"].nbytes


def test_decoded_arrays_can_be_changed() -> None:
    model = decode_snapshot(encode_snapshot(make_model()), schema=Schema.of_model(make_model()))
    for array in model.values():
        array[...] = 0


def test_a_snapshot_that_unfolds_to_too_much_is_refused_before_allocating() -> None:
    zeros = {"w": np.zeros(100_000, dtype=np.uint16)}
    parts = encode_snapshot(zeros)
    assert len(parts[0]) < 300
    with pytest.raises(CorruptPart, match="unfolds to 200000 bytes; the limit is 199999"):
        decode_snapshot(parts, schema=Schema.of_model(zeros), max_bytes=199_999)


def test_a_delta_is_not_a_snapshot() -> None:
    base = make_model()
    with pytest.raises(CorruptPart, match="kind 1 where 0"):
        decode_snapshot(encode_delta(base, trained(base, 1)), schema=Schema.of_model(base))


def test_an_empty_model_is_refused() -> None:
    with pytest.raises(ValueError, match="no tensors"):
        encode_snapshot({})
