"""Deltas added up and turned around, without the models they lie between.

Invariant: applying a merged delta is applying its members one after the other, and a delta followed by its
inverse changes nothing. Only a RICE_CTX tile needs the base to be understood. Scratch is one tile at a time.
The publisher's compactor and rollbacks call it.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from astraflow_weights.codec.parts.format import TARGET_PART_BYTES
from astraflow_weights.codec.parts.reader import PartSet, open_parts
from astraflow_weights.codec.parts.writer import PartSetHead, Placed, write_parts
from astraflow_weights.codec.tensors import (
    MAX_TILE_ELEMENTS,
    Array,
    Model,
    TensorSpec,
    flat_unsigned,
    specs_of,
    tile_ranges,
)
from astraflow_weights.codec.tiles import delta as tile_delta
from astraflow_weights.codec.tiles.grid import EncodedTile, PartKind, StoredTile, TileCodec
from astraflow_weights.errors import ModelMismatch, NeedsBase


def merge_deltas(
    deltas: Sequence[Sequence[bytes]], *, base: Model | None = None, part_bytes: int = TARGET_PART_BYTES
) -> list[bytes]:
    """One delta for a chain of at least one, oldest first; changes that cancel out vanish.

    `base` is the model before the first delta. It is needed when a tile is RICE_CTX, and lets the result use that
    codec. Deterministic. Raises NeedsBase, CorruptPart, ValueError for deltas that do not follow each other
    and ModelMismatch for a base of another model.
    """
    opened = [open_parts(parts, kind=PartKind.DELTA) for parts in deltas]
    if not opened:
        raise ValueError("no deltas given; a merge needs at least one")
    _check_chain(opened)
    specs = opened[0].specs
    bases = _base_views(specs, base)
    by_cell = [_by_cell(delta) for delta in opened]

    def merged(spec: TensorSpec, start: int, count: int) -> EncodedTile:
        cells = [cell[spec.name, start] for cell in by_cell]
        return _merge_cell(cells, start=start, count=count, base=bases.get(spec.name))

    head = PartSetHead(
        kind=PartKind.DELTA,
        base_version=opened[0].head.base_version,
        target_version=opened[-1].head.target_version,
    )
    return write_parts(_cells(specs, merged), head=head, specs=specs, part_bytes=part_bytes)


def invert_delta(
    parts: Sequence[bytes],
    *,
    base: Model | None = None,
    target_version: int | None = None,
    part_bytes: int = TARGET_PART_BYTES,
) -> list[bytes]:
    """The delta that leads back. `base` is the model before `parts`; needed when a tile is RICE_CTX.

    `target_version` is only written into the headers: the number under which the model before is published again,
    by default the one it had. Raises NeedsBase, CorruptPart, and ModelMismatch for a base of another model.
    """
    delta = open_parts(parts, kind=PartKind.DELTA)
    bases = _base_views(delta.specs, base)
    head = PartSetHead(
        kind=PartKind.DELTA,
        base_version=delta.head.target_version,
        target_version=delta.head.base_version if target_version is None else target_version,
    )
    return write_parts(_inverted(delta, bases), head=head, specs=delta.specs, part_bytes=part_bytes)


def _check_chain(opened: Sequence[PartSet]) -> None:
    for before, after in itertools.pairwise(opened):
        if before.head.schema != after.head.schema:
            raise ModelMismatch("the deltas are of different models; only deltas of one policy merge")
        if before.head.target_version != after.head.base_version:
            raise ValueError(
                f"a delta to version {before.head.target_version} is followed by one from version "
                f"{after.head.base_version}; give a chain, oldest first"
            )


def _base_views(specs: Sequence[TensorSpec], base: Model | None) -> dict[str, Array]:
    if base is None:
        return {}
    if specs_of(base) != tuple(specs):
        raise ModelMismatch("the base is not of the model that the delta was made for")
    return {name: flat_unsigned(array) for name, array in base.items()}


def _by_cell(delta: PartSet) -> dict[tuple[str, int], list[StoredTile]]:
    """Tiles by tensor and start of their grid cell: ranks may have split a cell differently."""
    cells: dict[tuple[str, int], list[StoredTile]] = {}
    for spec in delta.specs:
        for start, _ in tile_ranges(spec.num_elements):
            cells[spec.name, start] = []
    for tile in delta.tiles:
        cells[tile.spec.name, tile.start // MAX_TILE_ELEMENTS * MAX_TILE_ELEMENTS].append(tile)
    return cells


def _cells(
    specs: Sequence[TensorSpec], encode: Callable[[TensorSpec, int, int], EncodedTile]
) -> Iterator[Placed]:
    for spec in specs:
        if not spec.num_elements:
            yield spec, None
        for start, count in tile_ranges(spec.num_elements):
            yield spec, encode(spec, start, count)


def _merge_cell(
    cells: Sequence[Sequence[StoredTile]], *, start: int, count: int, base: Array | None
) -> EncodedTile:
    tiles = list(itertools.chain.from_iterable(cells))
    before = _before(tiles, start=start, count=count, base=base)
    after = before.copy()
    for tile in tiles:
        _apply(tile, after[tile.start - start : tile.start - start + tile.num_elements])
    return tile_delta.encode_tile(before, after, start=start, context=_has_context(tiles))


def _inverted(delta: PartSet, bases: dict[str, Array]) -> Iterator[Placed]:
    tiles = itertools.groupby(delta.tiles, key=lambda tile: tile.spec.name)
    by_name = {name: list(group) for name, group in tiles}
    for spec in delta.specs:
        if not spec.num_elements:
            yield spec, None
        for tile in by_name.get(spec.name, []):
            yield spec, _invert_tile(tile, base=bases.get(spec.name))


def _invert_tile(tile: StoredTile, *, base: Array | None) -> EncodedTile:
    before = _before([tile], start=tile.start, count=tile.num_elements, base=base)
    after = before.copy()
    _apply(tile, after)
    return tile_delta.encode_tile(after, before, start=tile.start, context=_has_context([tile]))


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
