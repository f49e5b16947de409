"""Deltas added up and turned around, without the models they lie between.

Invariant: applying a merged delta is applying its members one after the other, and a delta followed by its
inverse changes nothing. Only a RICE_CTX tile needs the base to be understood. Scratch is one tile at a time.
The publisher's compactor and rollbacks call it.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from astraflow_weights.codec.parts.format import TARGET_PART_BYTES
from astraflow_weights.codec.parts.reader import PartSet, open_parts
from astraflow_weights.codec.parts.writer import PartSetHead, Placed, write_parts
from astraflow_weights.codec.schema import Schema
from astraflow_weights.codec.tensors import Array, Model, TensorSpec, flat_unsigned, specs_of
from astraflow_weights.codec.tiles import delta as tile_delta
from astraflow_weights.codec.tiles.grid import PartKind, StoredTile, TileCodec
from astraflow_weights.errors import ModelMismatch, NeedsBase


def merge_deltas(
    deltas: Sequence[Sequence[bytes]],
    *,
    schema: Schema,
    base: Model | None = None,
    part_bytes: int = TARGET_PART_BYTES,
) -> list[bytes]:
    """One delta for a chain of at least one, oldest first; changes that cancel out vanish.

    `schema` is that of the model, `base` the model before the first delta. It is needed when a tile is RICE_CTX, and
    lets the result use that codec. Deterministic. Raises NeedsBase, CorruptPart, ValueError for deltas that do not
    follow each other and ModelMismatch for a base of another model.
    """
    opened = [open_parts(parts, kind=PartKind.DELTA, schema=schema) for parts in deltas]
    if not opened:
        raise ValueError("no deltas given; a merge needs at least one")
    _check_chain(opened)
    bases = _base_views(schema, base)
    head = PartSetHead(
        kind=PartKind.DELTA,
        base_version=opened[0].head.base_version,
        target_version=opened[-1].head.target_version,
    )
    tiles = _merged(schema, opened, bases)
    return list(write_parts(tiles, head=head, schema=schema, part_bytes=part_bytes))


def invert_delta(
    parts: Sequence[bytes],
    *,
    schema: Schema,
    base: Model | None = None,
    target_version: int | None = None,
    part_bytes: int = TARGET_PART_BYTES,
) -> list[bytes]:
    """The delta that leads back. `schema` is that of the model, `base` the model before `parts`: needed when a tile is
    RICE_CTX.

    `target_version` is only written into the headers: the number under which the model before is published again,
    by default the one it had. Raises NeedsBase, CorruptPart, and ModelMismatch for a base of another model.
    """
    delta = open_parts(parts, kind=PartKind.DELTA, schema=schema)
    bases = _base_views(schema, base)
    head = PartSetHead(
        kind=PartKind.DELTA,
        base_version=delta.head.target_version,
        target_version=delta.head.base_version if target_version is None else target_version,
    )
    return list(write_parts(_inverted(delta, bases), head=head, schema=schema, part_bytes=part_bytes))


def _check_chain(opened: Sequence[PartSet]) -> None:
    for before, after in itertools.pairwise(opened):
        if before.head.target_version != after.head.base_version:
            raise ValueError(
                f"a delta to version {before.head.target_version} is followed by one from version "
                f"{after.head.base_version}; give a chain, oldest first"
            )


def _base_views(schema: Schema, base: Model | None) -> dict[str, Array]:
    if base is None:
        return {}
    if specs_of(base) != schema.specs:
        raise ModelMismatch("the base is not of the model that the delta was made for")
    return {name: flat_unsigned(array) for name, array in base.items()}


def _merged(schema: Schema, deltas: Sequence[PartSet], bases: dict[str, Array]) -> Iterator[Placed]:
    for spec, start, (before, after), context in _changed_cells(schema, deltas, bases):
        tile = tile_delta.encode_tile(before, after, start=start, context=context)
        if tile is not None:
            yield spec, tile


def _inverted(delta: PartSet, bases: dict[str, Array]) -> Iterator[Placed]:
    for spec, start, (before, after), context in _changed_cells(delta.schema, [delta], bases):
        tile = tile_delta.encode_tile(after, before, start=start, context=context)
        assert tile is not None, "a tile has at least one change"
        yield spec, tile


def _changed_cells(
    schema: Schema, deltas: Sequence[PartSet], bases: dict[str, Array]
) -> Iterator[tuple[TensorSpec, int, tuple[Array, Array], bool]]:
    """Tensor and start of each cell with tiles, its elements before and after all of them, and whether one needs
    the base. Ranks may have split the cell differently.
    """
    by_cell: dict[int, list[StoredTile]] = {}
    for tile in itertools.chain.from_iterable(delta.tiles for delta in deltas):
        by_cell.setdefault(tile.cell, []).append(tile)
    for cell in sorted(by_cell):
        tiles = by_cell[cell]
        spec, start, count = schema.place(cell)
        before = _before(tiles, start=start, count=count, base=bases.get(spec.name))
        after = before.copy()
        for tile in tiles:
            _apply(tile, after[tile.start - start : tile.start - start + tile.num_elements])
        yield spec, start, (before, after), _has_context(tiles)


def _before(tiles: Sequence[StoredTile], *, start: int, count: int, base: Array | None) -> Array:
    """The base's elements, or zeros: differences do not depend on what they are added to, unless by class."""
    if base is not None:
        return base[start : start + count]
    for tile in tiles:
        if tile.codec is TileCodec.RICE_CTX:
            raise NeedsBase(
                f"{tile} counts inside classes of the base's values: pass the model before the delta as `base`"
            )
    return np.zeros(count, tiles[0].dtype)


def _apply(tile: StoredTile, elements: Array) -> None:
    tile_delta.decode_tile(tile, base=elements).apply_to(elements)


def _has_context(tiles: Sequence[StoredTile]) -> bool:
    return any(tile.codec is TileCodec.RICE_CTX for tile in tiles)
