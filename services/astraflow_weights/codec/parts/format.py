"""The byte layout of a part ("AFWD" container), in one place for its writer and its reader.

Invariant: little endian, fixed sizes, no padding between fields; every number has the bound written here.
`parts.writer` and `parts.reader` call it; docs/weight-format.md says the same in words.

    header, 64 bytes | TileTable (protobuf, perhaps a zstandard frame) | tile bodies | sha256 of all before
"""

import struct

import zstandard

from astraflow.weights.v1 import part_pb2
from astraflow_weights.errors import CorruptPart

MAGIC = b"AFWD"
FORMAT = 2
# magic, format, kind, flags, stored bytes of the table, schema id, base version, target version,
# writer, number of writers, number among the writer's parts, body bytes, tiles, real bytes of the table
HEADER = struct.Struct("<4sHBBI16sQQHHIIII")
SCHEMA_ID_BYTES = 16
LAST_OF_WRITER = 1
"""Flag: the writer made no part after this one."""
TRAILER_BYTES = 32
TARGET_PART_BYTES = 16 * 2**20
MAX_PART_BYTES = 64 * 2**20
MAX_WRITERS = 2**16 - 1
MAX_PARTS = 2**20
MAX_TILES = 2**18
"""Tiles of one part."""
_TABLE_BYTES_PER_TILE = 48
_TABLE_BYTES = 64
# Higher levels gain little on columns of small numbers.
_LEVEL = 3

assert HEADER.size == 64


def max_table_bytes(num_tiles: int) -> int:
    """What the table of so many tiles takes at most."""
    return _TABLE_BYTES + num_tiles * _TABLE_BYTES_PER_TILE


def pack_table(table: part_pb2.TileTable) -> tuple[bytes, int]:
    """The stored form of a table, compressed where that is shorter, and its real length."""
    raw = table.SerializeToString(deterministic=True)
    frame = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False, write_content_size=True).compress(
        raw
    )
    return (frame if len(frame) < len(raw) else raw), len(raw)


def unpack_table(stored: bytes, *, num_bytes: int) -> bytes:
    """The real bytes of a table, whose length was bounded. Raises CorruptPart."""
    if len(stored) == num_bytes:
        return stored
    try:
        declared = zstandard.get_frame_parameters(stored).content_size
        if declared != num_bytes or len(stored) > num_bytes:
            raise CorruptPart(f"a table of {num_bytes} bytes is stored as {len(stored)} for {declared}")
        raw = zstandard.ZstdDecompressor().decompress(
            stored, max_output_size=num_bytes, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise CorruptPart(f"a table of {len(stored)} bytes is not a zstandard frame: {error}") from error
    if len(raw) != num_bytes:
        raise CorruptPart(f"a table unfolds to {len(raw)} bytes instead of {num_bytes}")
    return raw
