"""The byte layout of a part ("AFWD" container), in one place for its writer and its reader.

Invariant: little endian, fixed sizes, no padding between fields; every number has the bound written here.
`parts.writer` and `parts.reader` call it; docs/weight-format.md says the same in words.

    header, 64 bytes | PartTable (protobuf) | tile rows, 48 bytes each | tile bodies | sha256 of all before
"""

import struct

import numpy as np

MAGIC = b"AFWD"
FORMAT = 1
# magic, format, kind, flags, header bytes (header + table + rows), schema id, base version, target version,
# part number, number of parts, body bytes, number of rows
HEADER = struct.Struct("<4sHBBI16sQQIIQI")
ROW = np.dtype(
    [
        ("start", "<u8"),
        ("num_elements", "<u4"),
        ("codec", "u1"),
        ("params", "u1", (3,)),
        ("aux", "<u4"),
        ("num_changed", "<u4"),
        ("body_start", "<u8"),
        ("body_bytes", "<u4"),
        ("reserved", "<u4"),
        ("body_xxh3", "<u8"),
    ]
)
TRAILER_BYTES = 32
TARGET_PART_BYTES = 16 * 2**20
MAX_PART_BYTES = 64 * 2**20
MAX_PARTS = 2**20

assert HEADER.size == 64
assert ROW.itemsize == 48
