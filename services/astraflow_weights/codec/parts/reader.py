"""Opens parts and proves that they belong together.

Invariant: whatever leaves here is in bounds: every length, offset, range and name was checked, every digest
was compared, and tiles cover each tensor exactly once. Hostile bytes raise CorruptPart and nothing else.
`delta` and `snapshot` call `open_parts`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from astraflow.weights.v1 import part_pb2
from astraflow_weights.codec.digest import schema_id, sha256
from astraflow_weights.codec.parts.format import (
    FORMAT,
    HEADER,
    MAGIC,
    MAX_PART_BYTES,
    MAX_PARTS,
    ROW,
    TRAILER_BYTES,
)
from astraflow_weights.codec.tensor_hash import tile_digest
from astraflow_weights.codec.tensors import MAX_AXES, MAX_TILE_ELEMENTS, TensorSpec, check_spec
from astraflow_weights.codec.tiles.grid import PartKind, StoredTile, TileCodec
from astraflow_weights.errors import CorruptPart

_CODECS = frozenset(TileCodec)


@dataclass(frozen=True, kw_only=True)
class PartHead:
    """The fixed header of a part."""

    kind: int
    schema: bytes
    base_version: int
    target_version: int
    number: int
    num_parts: int
    table_end: int
    rows_end: int
    body_bytes: int

    @property
    def shared(self) -> tuple[object, ...]:
        """What all parts of one set have in common."""
        return self.kind, self.schema, self.base_version, self.target_version, self.num_parts


@dataclass(frozen=True, kw_only=True)
class Part:
    """One opened part. `specs` names its tensors in order; `tiles` are views of its bytes."""

    head: PartHead
    specs: tuple[TensorSpec, ...]
    tiles: tuple[StoredTile, ...]


@dataclass(frozen=True, kw_only=True)
class PartSet:
    """All parts of one delta or snapshot: specs sorted by name, tiles sorted by tensor and start."""

    head: PartHead
    specs: tuple[TensorSpec, ...]
    tiles: tuple[StoredTile, ...]


def open_parts(parts: Sequence[bytes], *, kind: PartKind) -> PartSet:
    """Open a complete set, in any order. Raises CorruptPart for damage, and for parts missing, doubled or
    mixed.
    """
    return joined([open_part(part) for part in parts], kind=kind)


def joined(parts: Sequence[Part], *, kind: PartKind) -> PartSet:
    """The set that opened parts make, in any order. Raises as `open_parts` does."""
    opened = sorted(parts, key=lambda part: part.head.number)
    if not opened:
        raise CorruptPart("no parts given; a delta or snapshot has at least one")
    head = opened[0].head
    if head.kind != kind:
        raise CorruptPart(f"parts are of kind {head.kind} where {kind} ({kind.name.lower()}) is needed")
    if any(part.head.shared != head.shared for part in opened):
        raise CorruptPart("parts of different deltas or snapshots are mixed")
    if [part.head.number for part in opened] != list(range(head.num_parts)):
        raise CorruptPart(
            f"have parts {[part.head.number for part in opened]} of {head.num_parts}; some lack or repeat"
        )
    specs = _merged_specs(opened)
    tiles = sorted(
        (tile for part in opened for tile in part.tiles), key=lambda tile: (tile.spec.name, tile.start)
    )
    if schema_id(specs) != head.schema:
        raise CorruptPart("the tensors of the parts are not those their header was made for")
    _check_coverage(specs, tiles)
    return PartSet(head=head, specs=specs, tiles=tuple(tiles))


def open_part(data: bytes | memoryview) -> Part:
    """Open one part. Raises CorruptPart."""
    head = read_head(data)
    view = memoryview(data)
    if sha256(view[:-TRAILER_BYTES]) != data[-TRAILER_BYTES:]:
        raise CorruptPart(f"part {head.number}: the sha256 at its end does not match its {len(data)} bytes")
    rows = np.frombuffer(view[head.table_end : head.rows_end], dtype=ROW)
    body = view[head.rows_end : head.rows_end + head.body_bytes]
    _check_rows(rows, body_bytes=len(body))
    tensors = _tensors(view[HEADER.size : head.table_end], num_rows=len(rows))
    tiles = tuple(
        _tile(rows[index], spec=spec, body=body)
        for spec, first, count in tensors
        for index in range(first, first + count)
    )
    return Part(head=head, specs=tuple(spec for spec, _, _ in tensors), tiles=tiles)


@dataclass(frozen=True, kw_only=True)
class TileRange:
    """Where a part says that one of its tiles lies."""

    name: str
    start: int
    num_elements: int


def read_ranges(data: bytes, *, size_bytes: int) -> list[TileRange] | None:
    """What a part of `size_bytes` says to hold, from its first bytes; None when those are too few.

    No digest is compared: what is chosen by this must be proven by `open_part`. Raises CorruptPart.
    """
    head = read_head(data, size_bytes=size_bytes)
    if len(data) < head.rows_end:
        return None
    view = memoryview(data)
    rows = np.frombuffer(view[head.table_end : head.rows_end], dtype=ROW)
    return [
        TileRange(
            name=spec.name, start=int(rows[index]["start"]), num_elements=int(rows[index]["num_elements"])
        )
        for spec, first, count in _tensors(view[HEADER.size : head.table_end], num_rows=len(rows))
        for index in range(first, first + count)
    ]


def read_head(data: bytes | memoryview, *, size_bytes: int | None = None) -> PartHead:
    """The header alone, with lengths checked but no digest; `data` may be the beginning of a part of `size_bytes`.

    Raises CorruptPart.
    """
    size_bytes = len(data) if size_bytes is None else size_bytes
    if not HEADER.size + TRAILER_BYTES <= size_bytes <= MAX_PART_BYTES or len(data) < HEADER.size:
        raise CorruptPart(f"{size_bytes} bytes cannot be a part; the limit is {MAX_PART_BYTES}")
    (
        magic,
        number_format,
        kind,
        flags,
        rows_end,
        schema,
        base,
        target,
        number,
        num_parts,
        body_bytes,
        num_rows,
    ) = HEADER.unpack_from(data)
    if magic != MAGIC or number_format != FORMAT or flags != 0:
        raise CorruptPart(f"not a part of format {FORMAT}: begins with {data[:8].hex()}")
    table_end = rows_end - num_rows * ROW.itemsize
    if table_end < HEADER.size or rows_end + body_bytes + TRAILER_BYTES != size_bytes:
        raise CorruptPart(
            f"header ({rows_end} bytes) and body ({body_bytes} bytes) do not fill {size_bytes} bytes"
        )
    if not number < num_parts <= MAX_PARTS:
        raise CorruptPart(f"part number {number} of {num_parts} is out of bounds")
    return PartHead(
        kind=kind,
        schema=schema,
        base_version=base,
        target_version=target,
        number=number,
        num_parts=num_parts,
        table_end=table_end,
        rows_end=rows_end,
        body_bytes=body_bytes,
    )


def _check_rows(rows: npt.NDArray[Any], *, body_bytes: int) -> None:
    lengths = rows["body_bytes"].astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    if not np.array_equal(starts, rows["body_start"]) or int(lengths.sum()) != body_bytes:
        raise CorruptPart(f"tile bodies do not follow each other through {body_bytes} bytes")
    if not _CODECS.issuperset(rows["codec"].tolist()) or rows["reserved"].any():
        raise CorruptPart("a tile uses a codec this release does not know; update it")
    counts = rows["num_elements"].astype(np.uint64)
    if ((counts < 1) | (counts > MAX_TILE_ELEMENTS) | (rows["num_changed"] > counts)).any():
        raise CorruptPart(
            f"a tile has no element, more than {MAX_TILE_ELEMENTS}, or more changes than elements"
        )
    last = rows["start"] + counts - np.uint64(1)
    if (last < rows["start"]).any() or (
        last // MAX_TILE_ELEMENTS != rows["start"] // MAX_TILE_ELEMENTS
    ).any():
        raise CorruptPart("a tile crosses a line of the tile grid")


def _tensors(table: memoryview, *, num_rows: int) -> list[tuple[TensorSpec, int, int]]:
    try:
        message = part_pb2.PartTable.FromString(bytes(table))
        tensors = [(_spec(tensor), tensor.first_tile, tensor.num_tiles) for tensor in message.tensors]
    except (DecodeError, ValueError) as error:
        raise CorruptPart(f"the table of tensors is damaged: {error}") from error
    following = 0
    for spec, first, count in tensors:
        if first != following or (count == 0) != (spec.num_elements == 0):
            raise CorruptPart(
                f"tensor {spec.name!r} claims tiles {first} to {first + count}, expected {following}"
            )
        following += count
    if following != num_rows:
        raise CorruptPart(f"tensors claim {following} tiles of {num_rows}")
    return tensors


def _spec(tensor: part_pb2.PartTensor) -> TensorSpec:
    if len(tensor.shape) > MAX_AXES:
        raise ValueError(f"tensor {tensor.name!r} has {len(tensor.shape)} axes; the limit is {MAX_AXES}")
    return check_spec(TensorSpec(name=tensor.name, dtype=tensor.dtype, shape=tuple(tensor.shape)))


def _tile(row: Any, *, spec: TensorSpec, body: memoryview) -> StoredTile:  # noqa: ANN401 - one row of ROW
    start = int(row["body_start"])
    content = body[start : start + int(row["body_bytes"])]
    tile = StoredTile(
        spec=spec,
        start=int(row["start"]),
        num_elements=int(row["num_elements"]),
        codec=TileCodec(int(row["codec"])),
        body=content,
        num_changed=int(row["num_changed"]),
        params=(int(row["params"][0]), int(row["params"][1]), int(row["params"][2])),
        aux=int(row["aux"]),
    )
    if tile_digest(content) != int(row["body_xxh3"]):
        raise CorruptPart(f"{tile}: its body does not match its digest")
    return tile


def _merged_specs(parts: Sequence[Part]) -> tuple[TensorSpec, ...]:
    specs: dict[str, TensorSpec] = {}
    for spec in (spec for part in parts for spec in part.specs):
        if specs.setdefault(spec.name, spec) != spec:
            raise CorruptPart(f"parts disagree on tensor {spec.name!r}: {specs[spec.name]} and {spec}")
    return tuple(specs[name] for name in sorted(specs))


def _check_coverage(specs: Sequence[TensorSpec], tiles: Sequence[StoredTile]) -> None:
    covered = dict.fromkeys((spec.name for spec in specs), 0)
    for tile in tiles:
        if tile.start != covered[tile.spec.name]:
            raise CorruptPart(f"{tile} follows element {covered[tile.spec.name]}: tiles lack or overlap")
        covered[tile.spec.name] += tile.num_elements
    for spec in specs:
        if covered[spec.name] != spec.num_elements:
            raise CorruptPart(
                f"tiles cover {covered[spec.name]} of {spec.num_elements} elements of {spec.name!r}"
            )
