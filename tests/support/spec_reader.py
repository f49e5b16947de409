"""A reader of parts written from docs/weight-format.md alone: plain Python, slow, and nothing of the codec.

It takes bytes for what the page says and asserts where they differ. The contract tests read every vector with it, so
the page tells enough to write another one.
"""

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import zstandard

from astraflow.weights.v1 import part_pb2

CELL = 2**21
WIDTHS = {"bfloat16": 2, "float32": 4, "uint8": 1}
Bits = dict[str, list[int]]
"""By tensor: the bit patterns of its elements, flat."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a schema."""

    name: str
    dtype: str
    size: int


def read_schema(data: bytes) -> list[Tensor]:
    """The tensors of a schema object."""
    head = b"astraflow.weights.v1/schema\n"
    assert data.startswith(head)
    tensors, at = [], len(head)
    while at < len(data):
        texts = []
        for _ in range(2):
            (length,) = struct.unpack_from("<I", data, at)
            texts.append(data[at + 4 : at + 4 + length].decode())
            at += 4 + length
        (axes,) = struct.unpack_from("<I", data, at)
        size = 1
        for axis in struct.unpack_from(f"<{axes}Q", data, at + 4):
            size *= axis
        at += 4 + 8 * axes
        name, dtype = texts
        tensors.append(Tensor(name, dtype, size))
    return tensors


def read_set(schema: bytes, parts: Sequence[bytes], base: Mapping[str, Sequence[int]] | None) -> Bits:
    """The model that a whole set of parts makes: of a delta with the model that it starts from, else of a snapshot."""
    tensors = read_schema(schema)
    found = {t.name: list(base[t.name]) if base else [0] * t.size for t in tensors}
    cells = [(t, start) for t in tensors for start in range(0, t.size, CELL)]
    last: dict[int, int] = {}
    seen: dict[int, set[int]] = {}
    for part in parts:
        writer, number, is_last = _read_part(part, schema, cells, found, is_delta=base is not None)
        seen.setdefault(writer, set()).add(number)
        if is_last:
            last[writer] = number
    assert {writer: set(range(number + 1)) for writer, number in last.items()} == seen
    return found


def _read_part(
    part: bytes, schema: bytes, cells: Sequence[tuple[Tensor, int]], found: Bits, *, is_delta: bool
) -> tuple[int, int, bool]:
    assert part[-32:] == hashlib.sha256(part[:-32]).digest()
    (
        magic, version, kind, flags, stored_bytes, schema_id, _base, _target,
        writer, _writers, number, body_bytes, tiles, table_bytes,
    ) = struct.unpack_from("<4sHBBI16sQQHHIIII", part)  # fmt: skip
    assert (magic, version, kind) == (b"AFWD", 2, int(is_delta))
    assert schema_id == hashlib.sha256(schema).digest()[:16]
    stored = part[64 : 64 + stored_bytes]
    raw = stored if stored_bytes == table_bytes else zstandard.ZstdDecompressor().decompress(stored)
    table = part_pb2.TileTable.FromString(raw)
    bodies = part[64 + stored_bytes : -32]
    assert len(bodies) == body_bytes
    pieces = {piece.tile: piece for piece in table.partial_tiles}
    exponents = iter(table.first_exponents)
    cell, at = -1, 0
    for index in range(tiles):
        cell += table.skipped_cells[index] + 1
        tensor, start = cells[cell]
        count = min(CELL, tensor.size - start)
        if index in pieces:
            start, count = start + pieces[index].start, pieces[index].num_elements
        body = bodies[at : at + table.body_bytes[index]]
        at += len(body)
        codec = table.codecs[index]
        first = next(exponents) if codec == 3 else None
        elements = found[tensor.name][start : start + count]
        steps = _steps(codec, body, elements, WIDTHS[tensor.dtype], first)
        if is_delta:
            assert sum(step != 0 for step in steps) == table.num_changed[index]
        found[tensor.name][start : start + count] = [
            (old + step) % 2**16 if tensor.dtype == "bfloat16" else old ^ step
            for old, step in zip(elements, steps, strict=True)
        ]
    return writer, number, bool(flags & 1)


def _steps(codec: int, body: bytes, elements: Sequence[int], width: int, first: int | None) -> list[int]:
    """What is added to each element, which is 0 in a snapshot."""
    count = len(elements)
    if codec == 0:
        return [int.from_bytes(body[at : at + width], "little") for at in range(0, count * width, width)]
    if codec in (2, 3):
        ranked = [range(count)] if first is None else _classes(elements, first)
        steps = [0] * count
        for positions, changes in zip(ranked, _rice(body, num_classes=len(ranked)), strict=True):
            for rank, step in changes:
                steps[positions[rank]] = step
        return steps
    planes = _streams(body, num=2 if codec == 4 else width, length=count)
    if codec == 4:
        pairs = zip(*planes, strict=True)
        return [(other & 0x80) << 8 | exponent << 7 | other & 0x7F for exponent, other in pairs]
    assert codec == 5
    return [int.from_bytes(element, "little") for element in zip(*planes, strict=True)]


def _streams(body: bytes, *, num: int, length: int) -> list[bytes]:
    lengths = struct.unpack_from(f"<{num}I", body)
    streams, at = [], 4 * num
    for stored in lengths:
        content = body[at : at + stored]
        streams.append(content if stored == length else zstandard.ZstdDecompressor().decompress(content))
        at += stored
    assert at == len(body)
    return streams


def _classes(elements: Sequence[int], first: int) -> list[list[int]]:
    classes: list[list[int]] = [[] for _ in range(16)]
    for position, value in enumerate(elements):
        classes[min(15, max(0, (value >> 7 & 0xFF) - first))].append(position)
    return classes


class _Plane:
    """Bits of bytes, the least significant of each first."""

    def __init__(self, data: bytes) -> None:
        self._bits = (byte >> place & 1 for byte in data for place in range(8))

    def unary(self) -> int:
        count = 0
        while not next(self._bits):
            count += 1
        return count

    def number(self, bits: int) -> int:
        return sum(next(self._bits) << place for place in range(bits))


@dataclass
class _Class:
    """Parameters of one class, and what was read of it."""

    changes: int
    gap_bits: int = 0
    size_bits: int = 0
    mode: int = 0
    exceptions: int = 0


class _Body:
    """The body of a tile, read from its beginning."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, size: int) -> bytes:
        self._at += size
        return self._data[self._at - size : self._at]

    def plane(self, size: int) -> _Plane:
        return _Plane(self.take(size))

    def rest(self) -> _Plane:
        return _Plane(self._data[self._at :])

    def varint(self) -> int:
        value = shift = 0
        while (byte := self.take(1)[0]) & 0x80:
            value |= (byte & 0x7F) << shift
            shift += 7
        return value | byte << shift

    def one_class(self) -> _Class:
        one = _Class(self.varint())
        if one.changes:
            first, one.size_bits = self.take(2)
            one.gap_bits, one.mode = first % 32, first // 32
            one.exceptions = self.varint() if one.mode == 0 else 0
        return one


def _rice(data: bytes, *, num_classes: int) -> Iterator[list[tuple[int, int]]]:
    """For each class its changes: rank and difference."""
    body = _Body(data)
    gap_q, run_q, size_q = body.varint(), body.varint(), body.varint()
    classes = [body.one_class() for _ in range(num_classes)]
    gaps = _coded(gap_q, body, [(one.changes, one.gap_bits) for one in classes])
    signs = body.plane(-(-sum(one.changes for one in classes) // 8))
    runs = _coded(run_q, body, [(one.exceptions, one.size_bits) for one in classes])
    sizes = body.plane(size_q), body.rest()
    for one, ranks, exceptional in zip(classes, map(_ascending, gaps), map(_ascending, runs), strict=True):
        differences = []
        for index in range(one.changes):
            size = _size(*sizes, one=one) if one.mode == 1 or index in exceptional else 1
            differences.append((-size if signs.number(1) else size) % 2**16)
        yield list(zip(ranks, differences, strict=True))


def _size(quotients: _Plane, low: _Plane, *, one: _Class) -> int:
    order = one.size_bits if one.mode == 1 else 0
    bits = quotients.unary() + order
    value = (1 << bits) + low.number(bits) - (1 << order)
    return value + (1 if one.mode == 1 else 2)


def _ascending(gaps: Sequence[int]) -> list[int]:
    places, after = [], -1
    for gap in gaps:
        after += gap + 1
        places.append(after)
    return places


def _coded(num_bytes: int, body: _Body, counts: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Values of each class from their two planes, the first of which has so many bytes."""
    quotients = body.plane(num_bytes)
    high = [[quotients.unary() for _ in range(count)] for count, _ in counts]
    low = body.plane(-(-sum(count * bits for count, bits in counts) // 8))
    return [
        [quotient << bits | low.number(bits) for quotient in values]
        for values, (_, bits) in zip(high, counts, strict=True)
    ]
