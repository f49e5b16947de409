"""Deltas: what must be added, element by element, to get from one model to the next.

Invariant: steps are wrapped unsigned differences, so a delta is exact for every bit pattern, and deltas add
up and invert without the model. `apply_delta` changes nothing unless every part is good. Publisher and
mirror call it.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from astraflow_weights.codec.ordered import in_order
from astraflow_weights.codec.parts.format import TARGET_PART_BYTES
from astraflow_weights.codec.parts.reader import PartSet, open_part, open_parts
from astraflow_weights.codec.parts.writer import PartSetHead, Placed, write_parts
from astraflow_weights.codec.schema import Schema
from astraflow_weights.codec.shards import ShardedModel, whole
from astraflow_weights.codec.tensors import (
    Model,
    TensorSpec,
    flat_unsigned,
    require_same_specs,
    tile_ranges,
)
from astraflow_weights.codec.tiles import delta as tile_delta
from astraflow_weights.codec.tiles.grid import EncodedTile, PartKind, Steps, StoredTile
from astraflow_weights.errors import CorruptPart

# Decoded steps that are kept between the check and the writing; what is beyond is decoded twice.
_KEPT_BYTES = 32 * 2**20


@dataclass(frozen=True, kw_only=True)
class DeltaSummary:
    """What a delta changes."""

    num_changed: int
    size_bytes: int


def encode_delta(
    base: Model,
    target: Model,
    *,
    context: bool = False,
    base_version: int = 0,
    target_version: int = 0,
    part_bytes: int = TARGET_PART_BYTES,
) -> list[bytes]:
    """Parts that turn `base` into `target`; both hold uint16 bit patterns (bfloat16), float32 or uint8
    arrays.

    Deterministic. The versions are only written into the headers. `context` allows RICE_CTX, which is a third
    smaller, costs about four times the time, and needs the base to be merged or inverted. Raises
    ModelMismatch when names, dtypes or shapes differ, ValueError for other dtypes.
    """
    head = PartSetHead(kind=PartKind.DELTA, base_version=base_version, target_version=target_version)
    held = whole(target)
    tiles = encode_delta_tiles(whole(base), held, context=context)
    return list(write_parts(tiles, head=head, schema=Schema.of(held.specs), part_bytes=part_bytes))


def encode_delta_tiles(
    base: ShardedModel, target: ShardedModel, *, context: bool = False, threads: int = 1
) -> Iterator[Placed]:
    """Tiles that turn one process's shards of `base` into those of `target`, which are cut alike; what is equal has
    none.

    The changes that `target` knows are those over `base`. Raises ModelMismatch when the models differ in
    names, dtypes or shapes.
    """
    require_same_specs(base.specs, target.specs)

    def encode(place: _Place) -> EncodedTile | None:
        before, after = base.shards[place.spec.name], target.shards[place.spec.name]
        first = place.start - after.start
        span = slice(first, first + place.count)
        changes = target.changes.within(place.spec.name, first, place.count) if target.changes else None
        return tile_delta.encode_tile(
            before.elements[span],
            after.elements[span],
            start=place.start,
            context=context,
            changes=changes,
        )

    places = list(_places(base, target))
    tiles = in_order(encode, places, threads=threads, name="weights-encode")
    for place, tile in zip(places, tiles, strict=True):
        if tile is not None:
            yield place.spec, tile


@dataclass(frozen=True, slots=True)
class _Place:
    """A tile of a shard."""

    spec: TensorSpec
    start: int
    count: int


def _places(base: ShardedModel, target: ShardedModel) -> Iterator[_Place]:
    for spec, after in target.held():
        before = base.shards[spec.name]
        assert (before.start, before.stop) == (after.start, after.stop)
        for start, count in tile_ranges(after.stop, start=after.start):
            yield _Place(spec, start, count)


def apply_delta(mirror: Model, parts: Sequence[bytes]) -> None:
    """Add a complete delta to `mirror`, in place. Not idempotent.

    Every part is checked and every tile decoded before the first write: CorruptPart, for damaged parts and
    for parts made for another model, leaves the mirror as it was. Names that share one memory (tied
    weights) are changed once. Raises ValueError when an array is read-only, not contiguous or overlaps
    another in part.
    """
    delta = open_parts(parts, kind=PartKind.DELTA, schema=Schema.of_model(mirror))
    flats = _flat_views(mirror)
    tiles = _without_aliases(delta, flats)
    decoded = _decoded(tiles, flats)
    for tile in tiles:
        elements = _slice(flats, tile)
        steps = decoded.pop((tile.spec.name, tile.start), None)
        (steps or tile_delta.decode_tile(tile, base=elements)).apply_to(elements)


def summarize_delta(parts: Sequence[bytes]) -> DeltaSummary:
    """Count what a delta changes. Raises CorruptPart for a damaged part; whether all are there is not looked at."""
    opened = [open_part(part) for part in parts]
    return DeltaSummary(
        num_changed=sum(int(part.num_changed.sum()) for part in opened),
        size_bytes=sum(map(len, parts)),
    )


def _decoded(tiles: Sequence[StoredTile], flats: dict[str, npt.NDArray[Any]]) -> dict[tuple[str, int], Steps]:
    """Decode every tile, which proves that each can be; keep the first ones, to not decode those again."""
    kept: dict[tuple[str, int], Steps] = {}
    size_bytes = 0
    for tile in tiles:
        steps = tile_delta.decode_tile(tile, base=_slice(flats, tile))
        size_bytes += steps.size_bytes
        if size_bytes <= _KEPT_BYTES:
            kept[tile.spec.name, tile.start] = steps
    return kept


def _flat_views(mirror: Model) -> dict[str, npt.NDArray[Any]]:
    for name, array in mirror.items():
        if not (array.flags.c_contiguous and array.flags.writeable):
            raise ValueError(f"tensor {name!r} cannot be changed in place; pass a writable, contiguous array")
    return {name: flat_unsigned(array) for name, array in mirror.items()}


def _without_aliases(delta: PartSet, flats: dict[str, npt.NDArray[Any]]) -> list[StoredTile]:
    """Tiles of every tensor but those whose memory another tensor already stands for."""
    owners = _owners(flats)
    contents: dict[str, list[tuple[object, ...]]] = {name: [] for name in owners}
    for tile in delta.tiles:
        contents[tile.spec.name].append(
            (tile.start, tile.num_elements, tile.codec, tile.num_changed, tile.first_exponent, tile.body)
        )
    for name, owner in owners.items():
        if contents[name] != contents[owner]:
            raise CorruptPart(
                f"{name!r} shares its memory with {owner!r} and the delta changes them differently"
            )
    return [tile for tile in delta.tiles if owners[tile.spec.name] == tile.spec.name]


def _owners(flats: dict[str, npt.NDArray[Any]]) -> dict[str, str]:
    """For each tensor the first of those that share its memory. Raises ValueError for a partial overlap."""
    spans = sorted((_address(flat), flat.nbytes, name) for name, flat in flats.items() if flat.nbytes)
    owners = {name: name for name in flats}
    for (start, size, name), (next_start, next_size, next_name) in itertools.pairwise(spans):
        if (start, size) == (next_start, next_size):
            owners[next_name] = owners[name]
        elif next_start < start + size:
            raise ValueError(f"tensors {name!r} and {next_name!r} overlap in part; give each its own memory")
    return owners


def _address(flat: npt.NDArray[Any]) -> int:
    return int(flat.__array_interface__["data"][0])


def _slice(flats: dict[str, npt.NDArray[Any]], tile: StoredTile) -> npt.NDArray[Any]:
    return flats[tile.spec.name][tile.start : tile.start + tile.num_elements]
