"""Puts encoded tiles into parts.

Invariant: equal input gives equal bytes, so a part can be named by its content and sent again without harm;
a part never splits a tile. `delta` and `snapshot` call it: `group_tiles` first, because a part carries how
many parts there are, then `seal_parts`, once every process has grouped its tiles.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from astraflow.weights.v1 import part_pb2
from astraflow_weights.codec.digest import schema_id, sha256
from astraflow_weights.codec.parts.format import FORMAT, HEADER, MAGIC, MAX_PART_BYTES, ROW, TRAILER_BYTES
from astraflow_weights.codec.tensor_hash import tile_digest
from astraflow_weights.codec.tensors import Array, TensorSpec
from astraflow_weights.codec.tiles.grid import EncodedTile, PartKind


@dataclass(frozen=True, kw_only=True)
class PartSetHead:
    """What all parts of one delta or snapshot share. Versions are 0 where the caller does not know them."""

    kind: PartKind
    base_version: int = 0
    target_version: int = 0


# Place of "header bytes" in `HEADER`.
_ROWS_END = 4
# A tile with its tensor; None stands for a tensor without elements, which must still be named once.
Placed = tuple[TensorSpec, EncodedTile | None]
TileGroups = list[list[Placed]]


def write_parts(
    tiles: Iterable[Placed], *, head: PartSetHead, specs: Sequence[TensorSpec], part_bytes: int
) -> list[bytes]:
    """Parts of about `part_bytes` holding all tiles in the given order. Raises ValueError for a size out of
    bounds.
    """
    groups = group_tiles(tiles, part_bytes=part_bytes)
    return seal_parts(groups, head=head, specs=specs, first=0, num_parts=len(groups))


def group_tiles(tiles: Iterable[Placed], *, part_bytes: int) -> TileGroups:
    """Tiles in their order, cut into groups of about `part_bytes`, one for each part; none for no tiles.

    Raises ValueError for a size out of bounds.
    """
    if not 1 <= part_bytes <= MAX_PART_BYTES // 2:
        raise ValueError(f"part_bytes {part_bytes} must be 1 to {MAX_PART_BYTES // 2}")
    groups: list[list[Placed]] = []
    size = 0
    for spec, tile in tiles:
        added = ROW.itemsize + len(spec.name.encode()) + (len(tile.body) if tile else 0)
        if not groups or size + added > part_bytes:
            groups.append([])
            size = 0
        groups[-1].append((spec, tile))
        size += added
    return groups


def seal_parts(
    groups: TileGroups, *, head: PartSetHead, specs: Sequence[TensorSpec], first: int, num_parts: int
) -> list[bytes]:
    """Parts number `first`, `first` + 1 … of `num_parts`, one for each group. `specs` is the whole model.

    Empties the groups on the way: a tile does not take memory twice for longer than its part is made.
    """
    schema = schema_id(specs)
    parts = []
    for number, group in enumerate(groups, start=first):
        parts.append(_part(group, head=head, schema=schema, number=number, num_parts=num_parts))
        group.clear()
    return parts


def salted(part: bytes, *, salt: int) -> bytes:
    """The same content under another sha256, for a name that was collected. `salt` is 1 to 2^32 - 1."""
    (*head, num_rows) = HEADER.unpack_from(part)
    rows_end: int = head[_ROWS_END]
    table_end = rows_end - num_rows * ROW.itemsize
    table = part_pb2.PartTable.FromString(part[HEADER.size : table_end])
    table.salt = salt
    encoded = table.SerializeToString(deterministic=True)
    head[_ROWS_END] = rows_end + HEADER.size + len(encoded) - table_end
    content = b"".join((HEADER.pack(*head, num_rows), encoded, part[table_end:-TRAILER_BYTES]))
    return content + sha256(content)


def _part(group: Sequence[Placed], *, head: PartSetHead, schema: bytes, number: int, num_parts: int) -> bytes:
    tiles = [tile for _, tile in group if tile is not None]
    table = _table(group).SerializeToString(deterministic=True)
    rows = _rows(tiles).tobytes()
    body_bytes = sum(len(tile.body) for tile in tiles)
    header = HEADER.pack(
        MAGIC, FORMAT, head.kind, 0, HEADER.size + len(table) + len(rows), schema,
        head.base_version, head.target_version, number, num_parts, body_bytes, len(tiles),
    )  # fmt: skip
    content = (header, table, rows, *(tile.body for tile in tiles))
    return b"".join((*content, sha256(*content)))


def _table(group: Sequence[Placed]) -> part_pb2.PartTable:
    table = part_pb2.PartTable()
    first = 0
    for spec, placed in groupby(group, key=lambda entry: entry[0]):
        count = sum(tile is not None for _, tile in placed)
        table.tensors.add(
            name=spec.name, dtype=spec.dtype, shape=spec.shape, first_tile=first, num_tiles=count
        )
        first += count
    return table


def _rows(tiles: Sequence[EncodedTile]) -> Array:
    rows = np.zeros(len(tiles), dtype=ROW)
    body_start = 0
    for row, tile in zip(rows, tiles, strict=True):
        row["start"], row["num_elements"] = tile.start, tile.num_elements
        row["codec"], row["params"], row["aux"] = tile.codec, tile.params, tile.aux
        row["num_changed"] = tile.num_changed
        row["body_start"], row["body_bytes"] = body_start, len(tile.body)
        row["body_xxh3"] = tile_digest(tile.body)
        body_start += len(tile.body)
    return rows
