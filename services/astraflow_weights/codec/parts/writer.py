"""Puts encoded tiles into parts, one after the other, as they come.

Invariant: equal input gives equal bytes, so a part can be named by its content and sent again without harm;
a part never splits a tile. No part knows how many follow, so that one can be sent while the next is made: only the
last of a writer says that it is. `delta`, `snapshot`, `merge` and the publisher call it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from astraflow.weights.v1 import part_pb2
from astraflow_weights.codec.digest import sha256
from astraflow_weights.codec.parts.format import (
    FORMAT,
    HEADER,
    LAST_OF_WRITER,
    MAGIC,
    MAX_PART_BYTES,
    MAX_TILES,
    SCHEMA_ID_BYTES,
    TARGET_PART_BYTES,
    TRAILER_BYTES,
    pack_table,
)
from astraflow_weights.codec.parts.reader import PartHead, read_head, read_table
from astraflow_weights.codec.schema import Schema
from astraflow_weights.codec.tensors import TensorSpec
from astraflow_weights.codec.tiles.grid import EncodedTile, PartKind, TileCodec


@dataclass(frozen=True, kw_only=True)
class PartSetHead:
    """What all parts of one delta or snapshot share. Versions are 0 where the caller does not know them."""

    kind: PartKind
    base_version: int = 0
    target_version: int = 0


# A tile with its tensor.
Placed = tuple[TensorSpec, EncodedTile]
# About what a tile takes beside its body.
_TILE_BYTES = 4


def write_parts(
    tiles: Iterable[Placed],
    *,
    head: PartSetHead,
    schema: Schema,
    part_bytes: int = TARGET_PART_BYTES,
    writer: int = 0,
    writers: int = 1,
) -> Iterator[bytes]:
    """Parts of about `part_bytes` with all tiles, which come by tensor and start; at least one part.

    `writer` of `writers` makes them: each has its own range of every tensor. Raises ValueError for a size out of
    bounds.
    """
    if not 1 <= part_bytes <= MAX_PART_BYTES // 2:
        raise ValueError(f"part_bytes {part_bytes} must be 1 to {MAX_PART_BYTES // 2}")
    first = PartHead(
        kind=head.kind,
        schema=schema.digest[:SCHEMA_ID_BYTES],
        base_version=head.base_version,
        target_version=head.target_version,
        writer=writer,
        writers=writers,
        number=0,
        is_last=True,
    )
    return _parts(tiles, head=first, schema=schema, part_bytes=part_bytes)


def _parts(tiles: Iterable[Placed], *, head: PartHead, schema: Schema, part_bytes: int) -> Iterator[bytes]:
    group: list[Placed] = []
    size = 0
    for spec, tile in tiles:
        added = _TILE_BYTES + len(tile.body)
        if group and (size + added > part_bytes or len(group) == MAX_TILES):
            yield _part(group, head=replace(head, is_last=False), schema=schema)
            head, group, size = replace(head, number=head.number + 1), [], 0
        group.append((spec, tile))
        size += added
    yield _part(group, head=head, schema=schema)


def salted(part: bytes, *, salt: int) -> bytes:
    """The same content under another sha256, for a name that was collected. `salt` is 1 to 2^32 - 1."""
    head = read_head(part)
    table = read_table(part, head)
    table.salt = salt
    bodies = part[head.table_end : -TRAILER_BYTES]
    return _sealed(head, table, num_tiles=head.num_tiles, bodies=[bodies])


def _part(group: Sequence[Placed], *, head: PartHead, schema: Schema) -> bytes:
    table = _table(group, schema=schema, has_changes=head.kind == PartKind.DELTA)
    return _sealed(head, table, num_tiles=len(group), bodies=[tile.body for _, tile in group])


def _sealed(head: PartHead, table: part_pb2.TileTable, *, num_tiles: int, bodies: Sequence[bytes]) -> bytes:
    stored, num_bytes = pack_table(table)
    header = HEADER.pack(
        MAGIC, FORMAT, head.kind, LAST_OF_WRITER if head.is_last else 0, len(stored), head.schema,
        head.base_version, head.target_version, head.writer, head.writers, head.number,
        sum(map(len, bodies)), num_tiles, num_bytes,
    )  # fmt: skip
    content = (header, stored, *bodies)
    return b"".join((*content, sha256(*content)))


def _table(group: Sequence[Placed], *, schema: Schema, has_changes: bool) -> part_pb2.TileTable:
    tiles = [tile for _, tile in group]
    cells = [schema.cell(spec.name, tile.start) for spec, tile in group]
    table = part_pb2.TileTable(
        skipped_cells=[cell - before - 1 for cell, before in zip(cells, [-1, *cells], strict=False)],
        codecs=bytes(tile.codec for tile in tiles),
        num_changed=[tile.num_changed for tile in tiles] if has_changes else [],
        body_bytes=[len(tile.body) for tile in tiles],
        first_exponents=bytes(t.first_exponent for t in tiles if t.codec is TileCodec.RICE_CTX),
    )
    for index, (cell, tile) in enumerate(zip(cells, tiles, strict=True)):
        _, start, count = schema.place(cell)
        if tile.num_elements != count:
            table.partial_tiles.add(tile=index, start=tile.start - start, num_elements=tile.num_elements)
    return table
