"""Every damaged part is refused: flipped bits, missing ends, and lies under digests that are right."""

import struct
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from astraflow_weights.codec import CorruptPart, Schema, apply_delta, encode_delta
from astraflow_weights.codec.delta import encode_delta_tiles
from astraflow_weights.codec.parts.format import MAX_PART_BYTES
from astraflow_weights.codec.parts.reader import open_part, open_parts, read_head, read_table
from astraflow_weights.codec.parts.writer import PartSetHead, write_parts
from astraflow_weights.codec.tiles.grid import EncodedTile, PartKind, TileCodec
from support.part_fuzz import resealed, sealed, with_table
from support.weight_models import applied, same_model, split_model

SMALL = {"w": np.arange(40, dtype=np.uint16), "z": np.zeros((), dtype=np.float32)}
CHANGES = np.repeat(np.array([3, 0], dtype=np.uint16), [30, 10])
SMALL_PART = encode_delta(SMALL, {"w": SMALL["w"] ^ CHANGES, "z": SMALL["z"]})[0]
SCHEMA = Schema.of_model(SMALL)


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
    for candidate in (data, sealed(data), sealed(b"AFWD\x02\x00\x01\x00" + data)):
        with pytest.raises(CorruptPart):
            open_parts([candidate], kind=PartKind.DELTA, schema=SCHEMA)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"AFWX", "not a part"),
        (4, b"\x01\x00", "a part of format 1; this release reads format 2: run the release that wrote it"),
        (4, b"\x03\x00", "a part of format 3; this release reads format 2"),
        (7, b"\x02", "out of bounds"),
        (7, b"\x00", r"have parts \[0\] of writer 0"),
        (8, struct.pack("<I", 2**31), "do not fill"),
        (12, b"\x00" * 16, "made for another model"),
        (44, struct.pack("<H", 1), "writer 1 of 1 are out of bounds"),
        (46, struct.pack("<H", 0), "writer 0 of 0 are out of bounds"),
        (46, struct.pack("<H", 2), r"have parts \[\] of writer 1 of 2"),
        (48, struct.pack("<I", 1), r"have parts \[1\] of writer 0"),
        (48, struct.pack("<I", 2**20), "out of bounds"),
        (52, struct.pack("<I", 2**31), "do not fill"),
        (56, struct.pack("<I", 2), "of 1 tiles, not of 2"),
        (56, struct.pack("<I", 2**18 + 1), "the limit is 262144 tiles"),
        (60, struct.pack("<I", 2**26), "a table of 67108864 bytes"),
        (60, struct.pack("<I", 40), "not a zstandard frame"),
    ],
)
def test_headers_out_of_bounds_are_refused(offset: int, value: bytes, message: str) -> None:
    lying = SMALL_PART[:offset] + value + SMALL_PART[offset + len(value) :]
    with pytest.raises(CorruptPart, match=message):
        open_parts([resealed(lying)], kind=PartKind.DELTA, schema=SCHEMA)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"skipped_cells": [2]}, "cell 2 of 2"),
        ({"skipped_cells": [2**32 - 1]}, "cell 4294967295 of 2"),
        ({"skipped_cells": []}, "the cells of 0 tiles, not of 1"),
        ({"codecs": b"\x01"}, "a codec this release does not know"),
        ({"codecs": b"\x09"}, "a codec this release does not know"),
        ({"codecs": b""}, "the codecs of 0 tiles"),
        ({"codecs": b"\x03"}, "0 exponents for 1 tiles"),
        ({"first_exponents": b"\x00"}, "1 exponents for 0 tiles"),
        ({"num_changed": [0]}, "changes nothing"),
        ({"num_changed": [41]}, "says 41 changes of 40 elements"),
        ({"num_changed": [29]}, "says 29 changes and holds 30"),
        ({"body_bytes": [0]}, "do not fill"),
        ({"body_bytes": [2**32 - 1]}, "do not fill"),
        ({"partial_tiles": [(1, 0, 5)]}, "tile 1 of 1 has 5 elements"),
        ({"partial_tiles": [(0, 0, 5), (0, 5, 5)]}, "tile 0 of 1 has 5 elements"),
        ({"partial_tiles": [(0, 0, 0)]}, "tile 0 of 1 has 0 elements"),
        ({"partial_tiles": [(0, 0, 40)]}, "is no part of a cell"),
        ({"partial_tiles": [(0, 2**32 - 1, 39)]}, "is no part of a cell"),
    ],
)
def test_tables_out_of_bounds_are_refused(change: dict[str, list[int] | bytes], message: str) -> None:
    table = read_table(SMALL_PART, read_head(SMALL_PART))
    for column, values in change.items():
        if isinstance(values, bytes):
            setattr(table, column, values)
        elif column == "partial_tiles":
            pieces: Any = values
            for tile, start, count in pieces:
                table.partial_tiles.add(tile=tile, start=start, num_elements=count)
        else:
            getattr(table, column)[:] = values
    mirror = {name: array.copy() for name, array in SMALL.items()}
    with pytest.raises(CorruptPart, match=message):
        apply_delta(mirror, [with_table(SMALL_PART, table)])


def test_two_writers_that_hold_the_same_elements_are_refused() -> None:
    head = PartSetHead(kind=PartKind.DELTA)
    spec = SCHEMA.specs[0]
    tiles = [
        EncodedTile(start=start, num_elements=20, codec=TileCodec.RAW, body=b"\1" * 40, num_changed=20)
        for start in (0, 19)
    ]
    parts = [
        next(write_parts([(spec, tile)], head=head, schema=SCHEMA, writer=writer, writers=2))
        for writer, tile in enumerate(tiles)
    ]
    with pytest.raises(CorruptPart, match=r"RAW tile \[19, 39\) of 'w' holds elements of RAW tile \[0, 20\)"):
        open_parts(parts, kind=PartKind.DELTA, schema=SCHEMA)


def test_a_table_that_unfolds_to_more_than_its_tiles_need_is_not_unfolded() -> None:
    """The declared length is bounded by the number of tiles, and the frame must be exactly that long."""
    bomb = zstandard.ZstdCompressor().compress(bytes(2**20))
    header = bytearray(SMALL_PART[:64])
    struct.pack_into("<I", header, 8, len(bomb))
    struct.pack_into("<III", header, 52, 0, 1, 112)
    with pytest.raises(CorruptPart, match="is stored as"):
        open_part(sealed(bytes(header) + bomb))


@given(st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=40), st.integers(1, 3))
def test_runs_of_tensors_that_did_not_change_take_next_to_nothing(
    tensors: list[tuple[int, bool]], writers: int
) -> None:
    """Any pattern of touched tensors comes back, from any number of writers; the others are not in the table."""
    base = {f"t{number:02}": np.arange(size, dtype=np.uint16) for number, (size, _) in enumerate(tensors)}
    target = {
        name: array + np.uint16(touched)
        for (name, array), (_, touched) in zip(base.items(), tensors, strict=True)
    }
    schema = Schema.of_model(base)
    head = PartSetHead(kind=PartKind.DELTA)
    held = zip(split_model(base, writers), split_model(target, writers), strict=True)
    parts = [
        part
        for writer, (before, after) in enumerate(held)
        for part in write_parts(
            encode_delta_tiles(before, after), head=head, schema=schema, writer=writer, writers=writers
        )
    ]
    assert same_model(applied(base, parts), target)
    found = open_parts(parts, kind=PartKind.DELTA, schema=schema)
    names = {name for name, (_, touched) in zip(base, tensors, strict=True) if touched}
    assert {tile.spec.name for tile in found.tiles} == names


def test_a_delta_of_sparse_experts_costs_few_bytes_per_change() -> None:
    """1,000 tensors, of which every fourth has 16 changes among 100,000 elements."""
    draw = np.random.default_rng(0)
    weights = draw.integers(0, 2**15, 100_000).astype(np.uint16)
    moved = weights.copy()
    moved[draw.choice(weights.size, 16, replace=False)] += np.uint16(1)
    base = {f"experts.{number}.up_proj.weight": weights for number in range(1000)}
    target = {name: moved if index % 4 == 0 else array for index, (name, array) in enumerate(base.items())}
    size_bytes = sum(map(len, encode_delta(base, target)))
    assert size_bytes / (250 * 16) < 2.6
