"""Every damaged part is refused: flipped bits, missing ends, and lies under digests that are right."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow_weights.codec import CorruptPart, decode_snapshot, encode_delta
from astraflow_weights.codec.parts.format import MAX_PART_BYTES, ROW, TRAILER_BYTES
from astraflow_weights.codec.parts.reader import open_part, open_parts, read_head
from astraflow_weights.codec.parts.writer import PartSetHead, write_parts
from astraflow_weights.codec.tensors import TensorSpec
from astraflow_weights.codec.tiles.grid import PartKind
from support.part_fuzz import sealed

SMALL = {"w": np.arange(40, dtype=np.uint16), "z": np.zeros((), dtype=np.float32)}
CHANGES = np.repeat(np.array([3, 0], dtype=np.uint16), [30, 10])
SMALL_PART = encode_delta(SMALL, {"w": SMALL["w"] ^ CHANGES, "z": SMALL["z"]})[0]


def test_every_flipped_bit_is_detected() -> None:
    for index in range(len(SMALL_PART) * 8):
        flipped = bytearray(SMALL_PART)
        flipped[index // 8] ^= 1 << index % 8
        with pytest.raises(CorruptPart):
            open_part(bytes(flipped))


def test_every_truncation_and_extension_is_detected() -> None:
    for length in range(len(SMALL_PART)):
        with pytest.raises(CorruptPart):
            open_part(SMALL_PART[:length])
    for more in (b"\0", b"x" * 32):
        with pytest.raises(CorruptPart):
            open_part(SMALL_PART + more)


def test_a_part_beyond_the_limit_is_refused_without_reading_it() -> None:
    with pytest.raises(CorruptPart, match=f"the limit is {MAX_PART_BYTES}"):
        open_part(bytes(MAX_PART_BYTES + 1))


@given(st.binary(max_size=400))
def test_random_bytes_are_not_a_part(data: bytes) -> None:
    for candidate in (data, sealed(data), sealed(b"AFWD\x01\x00\x01\x00" + data)):
        with pytest.raises(CorruptPart):
            open_parts([candidate], kind=PartKind.DELTA)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (4, b"\x02\x00", "not a part of format 1"),
        (7, b"\x01", "not a part of format 1"),
        (8, struct.pack("<I", 2**31), "do not fill"),
        (44, struct.pack("<I", 1), "part number 1 of 1"),
        (48, struct.pack("<I", 0), "part number 0 of 0"),
        (48, struct.pack("<I", 2), r"have parts \[0\] of 2"),
        (52, struct.pack("<Q", 2**63), "do not fill"),
        (60, struct.pack("<I", 2**26), "do not fill"),
        (12, b"\x00" * 16, "not those their header was made for"),
    ],
)
def test_headers_out_of_bounds_are_refused(offset: int, value: bytes, message: str) -> None:
    lying = SMALL_PART[:offset] + value + SMALL_PART[offset + len(value) :]
    with pytest.raises(CorruptPart, match=message):
        open_parts([sealed(lying[:-TRAILER_BYTES])], kind=PartKind.DELTA)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("start", 2**64 - 1, "crosses a line"),
        ("start", 2**21 - 1, "crosses a line"),
        ("start", 1, "tiles lack or overlap"),
        ("num_elements", 0, "no element"),
        ("num_elements", 2**21 + 1, "no element"),
        ("num_elements", 39, "cover 39 of 40"),
        ("num_changed", 41, "more changes than elements"),
        ("codec", 9, "a codec this release does not know"),
        ("reserved", 1, "a codec this release does not know"),
        ("body_start", 1, "do not follow each other"),
        ("body_bytes", 2**32 - 1, "do not follow each other"),
    ],
)
def test_rows_out_of_bounds_are_refused(field: str, value: int, message: str) -> None:
    head = read_head(SMALL_PART)
    content = bytearray(SMALL_PART[:-TRAILER_BYTES])
    np.frombuffer(content, dtype=ROW, offset=head.table_end, count=2)[field][0] = value
    with pytest.raises(CorruptPart, match=message):
        open_parts([sealed(bytes(content))], kind=PartKind.DELTA)


def test_the_digest_of_a_tile_is_checked_on_its_own() -> None:
    content = bytearray(SMALL_PART[:-TRAILER_BYTES])
    content[-1] ^= 1
    with pytest.raises(CorruptPart, match="its body does not match its digest"):
        open_part(sealed(bytes(content)))


@pytest.mark.parametrize("shape", [(0, 2**63), (2**40, 0, 2**40)])
def test_an_empty_tensor_that_no_array_can_hold_is_refused(shape: tuple[int, ...]) -> None:
    """Its product is 0, and an array of that shape cannot be made."""
    spec = TensorSpec(name="e", dtype="float32", shape=shape)
    head = PartSetHead(kind=PartKind.SNAPSHOT)
    parts = write_parts([(spec, None)], head=head, specs=[spec], part_bytes=1000)
    with pytest.raises(CorruptPart, match="at most 16 axes"):
        decode_snapshot(parts)
