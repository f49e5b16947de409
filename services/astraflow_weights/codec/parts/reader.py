"""Opens parts and proves that they belong together.

Invariant: whatever leaves here is in bounds: every length, cell and range was checked, every digest was compared, no
two tiles hold the same element, and every writer's parts are complete. Hostile bytes raise CorruptPart and nothing
else. A part opens on its own; where its tiles lie is known with the schema. `delta` and `snapshot` call `open_parts`.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from astraflow.weights.v1 import part_pb2
from astraflow_weights.codec.digest import sha256
from astraflow_weights.codec.parts.format import (
    FORMAT,
    HEADER,
    LAST_OF_WRITER,
    MAGIC,
    MAX_PART_BYTES,
    MAX_PARTS,
    MAX_TILES,
    SCHEMA_ID_BYTES,
    TRAILER_BYTES,
    max_table_bytes,
    unpack_table,
)
from astraflow_weights.codec.schema import MAX_CELLS, Schema
from astraflow_weights.codec.tensors import MAX_TILE_ELEMENTS
from astraflow_weights.codec.tiles.grid import PartKind, StoredTile, TileCodec
from astraflow_weights.errors import CorruptPart

_CODECS = frozenset(TileCodec)
Column = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class PartHead:
    """The fixed header of a part. `number` counts the parts of its writer."""

    kind: int
    schema: bytes
    base_version: int
    target_version: int
    writer: int
    writers: int
    number: int
    is_last: bool
    num_tiles: int = 0
    table_bytes: int = 0
    table_end: int = 0
    body_bytes: int = 0

    @property
    def shared(self) -> tuple[object, ...]:
        """What all parts of one set have in common."""
        return self.kind, self.schema, self.base_version, self.target_version, self.writers


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """One opened part: columns with one value per tile, and views of its bytes.

    `starts` and `lengths` are inside the cell; a length of 0 stands for a whole cell.
    """

    head: PartHead
    cells: Column
    starts: Column
    lengths: Column
    num_changed: Column
    codecs: tuple[TileCodec, ...]
    first_exponents: Sequence[int]
    bodies: Sequence[memoryview] = field(repr=False)

    def tiles(self, schema: Schema) -> tuple[StoredTile, ...]:
        """Its tiles by cell. Raises CorruptPart for another schema, and for tiles that do not fit into it."""
        if self.head.schema != schema.digest[:SCHEMA_ID_BYTES]:
            raise CorruptPart("the part was made for another model")
        if len(self.cells) and int(self.cells[-1]) >= schema.num_cells:
            raise CorruptPart(f"a tile lies in cell {self.cells[-1]} of {schema.num_cells}")
        return tuple(self._tile(index, schema) for index in range(len(self.cells)))

    def _tile(self, index: int, schema: Schema) -> StoredTile:
        cell, offset, length = int(self.cells[index]), int(self.starts[index]), int(self.lengths[index])
        spec, start, count = schema.place(cell)
        if offset + length > count or length == count:
            raise CorruptPart(f"{offset} to {offset + length} of {count} elements is no part of a cell")
        length, changed = length or count, int(self.num_changed[index])
        if changed > length:
            raise CorruptPart(f"a tile of {spec.name!r} says {changed} changes of {length} elements")
        return StoredTile(
            spec=spec,
            cell=cell,
            start=start + offset,
            num_elements=length,
            codec=self.codecs[index],
            body=self.bodies[index],
            num_changed=changed,
            first_exponent=self.first_exponents[index],
        )


@dataclass(frozen=True, kw_only=True)
class PartSet:
    """All parts of one delta or snapshot: tiles by cell and start, none twice."""

    head: PartHead
    schema: Schema
    tiles: tuple[StoredTile, ...]


def open_parts(parts: Sequence[bytes], *, kind: PartKind, schema: Schema) -> PartSet:
    """Open a complete set, in any order. Raises CorruptPart for damage, for parts missing, doubled or
    mixed, and for those of another model.
    """
    return joined([open_part(part) for part in parts], kind=kind, schema=schema)


def joined(parts: Sequence[Part], *, kind: PartKind, schema: Schema) -> PartSet:
    """The set that opened parts make, in any order. Raises as `open_parts` does."""
    opened = sorted(parts, key=lambda part: (part.head.writer, part.head.number))
    if not opened:
        raise CorruptPart("no parts given; a delta or snapshot has at least one")
    head = opened[0].head
    if head.kind != kind:
        raise CorruptPart(f"parts are of kind {head.kind} where {kind} ({kind.name.lower()}) is needed")
    if any(part.head.shared != head.shared for part in opened):
        raise CorruptPart("parts of different deltas or snapshots are mixed")
    _check_complete([part.head for part in opened])
    tiles = sorted(
        (tile for part in opened for tile in part.tiles(schema)), key=lambda tile: (tile.cell, tile.start)
    )
    for before, tile in itertools.pairwise(tiles):
        if before.cell == tile.cell and before.start + before.num_elements > tile.start:
            raise CorruptPart(f"{tile} holds elements of {before}")
    return PartSet(head=head, schema=schema, tiles=tuple(tiles))


def open_part(data: bytes | memoryview) -> Part:
    """Open one part. Raises CorruptPart."""
    head = read_head(data)
    view = memoryview(data)
    if sha256(view[:-TRAILER_BYTES]) != data[-TRAILER_BYTES:]:
        raise CorruptPart(
            f"part {head.number} of writer {head.writer}: the sha256 at its end does not match its "
            f"{len(data)} bytes"
        )
    table = read_table(data, head)
    cells, (starts, lengths) = _cells(table, head), _partial(table, head)
    codecs = _codecs(table, head)
    return Part(
        head=head,
        cells=cells,
        starts=starts,
        lengths=lengths,
        num_changed=_changes(table, head),
        codecs=codecs,
        first_exponents=_first_exponents(table, codecs),
        bodies=_bodies(table, head, view[head.table_end : -TRAILER_BYTES]),
    )


def read_cells(data: bytes, *, size_bytes: int) -> frozenset[int] | None:
    """The cells in which a part of `size_bytes` says to have tiles, from its first bytes; None when those are too few.

    No digest is compared: what is chosen by this must be proven by `open_part`. Raises CorruptPart.
    """
    head = read_head(data, size_bytes=size_bytes)
    if len(data) < head.table_end:
        return None
    return frozenset(_cells(read_table(data, head), head).tolist())


def read_head(data: bytes | memoryview, *, size_bytes: int | None = None) -> PartHead:
    """The header alone, with lengths checked but no digest; `data` may be the beginning of a part of `size_bytes`.

    Raises CorruptPart.
    """
    size_bytes = len(data) if size_bytes is None else size_bytes
    if not HEADER.size + TRAILER_BYTES <= size_bytes <= MAX_PART_BYTES or len(data) < HEADER.size:
        raise CorruptPart(f"{size_bytes} bytes cannot be a part; the limit is {MAX_PART_BYTES}")
    (
        magic, number_format, kind, flags, stored_bytes, schema, base, target,
        writer, writers, number, body_bytes, num_tiles, table_bytes,
    ) = HEADER.unpack_from(data)  # fmt: skip
    if magic != MAGIC:
        raise CorruptPart(f"not a part: begins with {bytes(data[:8]).hex()}")
    if number_format != FORMAT:
        raise CorruptPart(
            f"a part of format {number_format}; this release reads format {FORMAT}: run the release that wrote it, "
            "or start a new run"
        )
    if flags & ~LAST_OF_WRITER or not writer < writers or number >= MAX_PARTS:
        raise CorruptPart(f"flags {flags}, part {number} of writer {writer} of {writers} are out of bounds")
    if HEADER.size + stored_bytes + body_bytes + TRAILER_BYTES != size_bytes:
        raise CorruptPart(
            f"table ({stored_bytes} bytes) and bodies ({body_bytes} bytes) do not fill {size_bytes} bytes"
        )
    if num_tiles > MAX_TILES or not stored_bytes <= table_bytes <= max_table_bytes(num_tiles):
        raise CorruptPart(
            f"a table of {table_bytes} bytes for {num_tiles} tiles; the limit is {MAX_TILES} tiles"
        )
    return PartHead(
        kind=kind,
        schema=schema,
        base_version=base,
        target_version=target,
        writer=writer,
        writers=writers,
        number=number,
        is_last=bool(flags & LAST_OF_WRITER),
        num_tiles=num_tiles,
        table_bytes=table_bytes,
        table_end=HEADER.size + stored_bytes,
        body_bytes=body_bytes,
    )


def read_table(data: bytes | memoryview, head: PartHead) -> part_pb2.TileTable:
    """The table of a part whose header was read; its columns are not checked. Raises CorruptPart."""
    stored = bytes(data[HEADER.size : head.table_end])
    try:
        return part_pb2.TileTable.FromString(unpack_table(stored, num_bytes=head.table_bytes))
    except DecodeError as error:
        raise CorruptPart(f"the table of tiles is damaged: {error}") from error


def _column(values: Sequence[int], head: PartHead, *, what: str) -> Column:
    if len(values) != head.num_tiles:
        raise CorruptPart(f"the table says {what} of {len(values)} tiles, not of {head.num_tiles}")
    return np.fromiter(values, np.int64, len(values))


def _cells(table: part_pb2.TileTable, head: PartHead) -> Column:
    skipped = _column(table.skipped_cells, head, what="the cells")
    cells = np.cumsum(skipped + 1) - 1
    if len(cells) and int(cells[-1]) >= MAX_CELLS:
        raise CorruptPart(f"a tile lies in cell {cells[-1]}; the limit is {MAX_CELLS}")
    return cells


def _partial(table: part_pb2.TileTable, head: PartHead) -> tuple[Column, Column]:
    starts, lengths = np.zeros((2, head.num_tiles), np.int64)
    before = -1
    for piece in table.partial_tiles:
        if not before < piece.tile < head.num_tiles or not 0 < piece.num_elements < MAX_TILE_ELEMENTS:
            raise CorruptPart(f"tile {piece.tile} of {head.num_tiles} has {piece.num_elements} elements")
        starts[piece.tile], lengths[piece.tile] = piece.start, piece.num_elements
        before = piece.tile
    return starts, lengths


def _changes(table: part_pb2.TileTable, head: PartHead) -> Column:
    if head.kind != PartKind.DELTA:
        if table.num_changed:
            raise CorruptPart("a snapshot counts changes")
        return np.zeros(head.num_tiles, np.int64)
    changes = _column(table.num_changed, head, what="the changes")
    if not changes.all():
        raise CorruptPart("a tile of a delta changes nothing; it must not be there")
    return changes


def _codecs(table: part_pb2.TileTable, head: PartHead) -> tuple[TileCodec, ...]:
    _column(table.codecs, head, what="the codecs")
    if not _CODECS.issuperset(table.codecs):
        raise CorruptPart("a tile uses a codec this release does not know; update it")
    return tuple(map(TileCodec, table.codecs))


def _first_exponents(table: part_pb2.TileTable, codecs: Sequence[TileCodec]) -> Sequence[int]:
    places = [index for index, codec in enumerate(codecs) if codec is TileCodec.RICE_CTX]
    if len(places) != len(table.first_exponents):
        raise CorruptPart(f"{len(table.first_exponents)} exponents for {len(places)} tiles that need one")
    exponents = [0] * len(codecs)
    for index, exponent in zip(places, table.first_exponents, strict=True):
        exponents[index] = exponent
    return exponents


def _bodies(table: part_pb2.TileTable, head: PartHead, content: memoryview) -> Sequence[memoryview]:
    lengths = _column(table.body_bytes, head, what="the bodies")
    ends: Any = np.cumsum(lengths)
    if not lengths.all() or (int(ends[-1]) if len(ends) else 0) != len(content):
        raise CorruptPart(f"the bodies of {len(lengths)} tiles do not fill {len(content)} bytes")
    begins = (ends - lengths).tolist()
    return [content[begin:end] for begin, end in zip(begins, ends.tolist(), strict=True)]


def _check_complete(heads: Sequence[PartHead]) -> None:
    """Of each writer the parts 0, 1 … up to one that says it is the last. `heads` are sorted."""
    numbers: list[list[int]] = [[] for _ in range(heads[0].writers)]
    for head in heads:
        numbers[head.writer].append(head.number)
    last = {head.writer: head.number for head in heads if head.is_last}
    for writer, found in enumerate(numbers):
        if found != list(range(len(found))) or last.get(writer) != len(found) - 1:
            raise CorruptPart(f"have parts {found} of writer {writer} of {len(numbers)}; some lack or repeat")
