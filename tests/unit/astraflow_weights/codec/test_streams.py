"""Streams give back what went in, and refuse what does not fit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow_weights.codec.streams import join_planes, pack, split_planes, unpack
from astraflow_weights.errors import CorruptPart

streams = st.lists(st.binary(max_size=300) | st.integers(0, 5000).map(bytes), min_size=1, max_size=5)


@given(streams)
def test_packed_streams_come_back(contents: list[bytes]) -> None:
    body = pack([np.frombuffer(content, dtype=np.uint8) for content in contents])
    restored = unpack(memoryview(body), lengths=[len(content) for content in contents])
    assert [stream.tobytes() for stream in restored] == contents


@given(streams, st.data())
def test_a_body_never_yields_streams_of_other_lengths(contents: list[bytes], data: st.DataObject) -> None:
    body = pack([np.frombuffer(content, dtype=np.uint8) for content in contents])
    lengths = [len(content) for content in contents]
    index = data.draw(st.integers(0, len(lengths) - 1))
    lengths[index] += data.draw(st.integers(1, 10_000))
    with pytest.raises(CorruptPart):
        unpack(memoryview(body), lengths=lengths)


@pytest.mark.parametrize("dtype", ["u1", "<u2", "<u4"])
def test_planes_join_to_the_integers_they_came_from(dtype: str) -> None:
    values = np.random.default_rng(1).integers(0, 256, 40, dtype=np.uint8).view(dtype)
    planes = split_planes(values)
    assert len(planes) == values.dtype.itemsize
    assert np.array_equal(join_planes(planes, dtype=values.dtype), values)


def test_a_frame_that_declares_more_than_the_tile_needs_is_not_unfolded() -> None:
    bomb = pack([np.zeros(10_000_000, dtype=np.uint8)])
    with pytest.raises(CorruptPart, match="declares 10000000 bytes where the tile needs 500"):
        unpack(memoryview(bomb), lengths=[500])


@given(st.binary(max_size=80), st.lists(st.integers(0, 100), min_size=1, max_size=4))
def test_random_bytes_raise_nothing_but_corrupt_part(body: bytes, lengths: list[int]) -> None:
    try:
        restored = unpack(memoryview(body), lengths=lengths)
    except CorruptPart:
        return
    assert [len(stream) for stream in restored] == lengths
