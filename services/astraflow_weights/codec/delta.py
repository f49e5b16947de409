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

from astraflow_weights.codec.parts.format import TARGET_PART_BYTES
from astraflow_weights.codec.parts.reader import PartSet, open_parts
from astraflow_weights.codec.parts.writer import PartSetHead, Placed, write_parts
from astraflow_weights.codec.shards import ShardedModel, whole
from astraflow_weights.codec.tensors import Model, flat_unsigned, require_same_specs, spec_of, tile_ranges
from astraflow_weights.codec.tiles import delta as tile_delta
from astraflow_weights.codec.tiles.grid import PartKind, Steps, StoredTile
from astraflow_weights.errors import CorruptPart

# Decoded steps that are kept between the check and the writing; what is beyond is decoded twice.
_KEPT_BYTES = 32 * 2**20


@dataclass(frozen=True, kw_only=True)
class DeltaSummary:
    """What a delta changes."""

    num_changed: int
    num_elements: int
    size_bytes: int

    @property
    def density(self) -> float:
        """Changed share of all elements; 0 for a model without elements."""
        return self.num_changed / self.num_elements if self.num_elements else 0.0


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
    return write_parts(tiles, head=head, specs=held.specs, part_bytes=part_bytes)


def encode_delta_tiles(
    base: ShardedModel, target: ShardedModel, *, context: bool = False
) -> Iterator[Placed]:
    """Tiles that turn one process's shards of `base` into those of `target`; both are cut alike.

    The changes that `target` knows are those over `base`. Raises ModelMismatch when the models differ in
    names, dtypes or shapes.
    """
    require_same_specs(base.specs, target.specs)
    for spec, after in target.held():
        before = base.shards[spec.name]
        assert (before.start, before.stop) == (after.start, after.stop)
        if not spec.num_elements:
            yield spec, None
        for start, count in tile_ranges(after.stop, start=after.start):
            first = start - after.start
            span = slice(first, first + count)
            changes = target.changes.within(spec.name, first, count) if target.changes else None
            yield (
                spec,
                tile_delta.encode_tile(
                    before.elements[span],
                    after.elements[span],
                    start=start,
                    context=context,
                    changes=changes,
                ),
            )


def apply_delta(mirror: Model, parts: Sequence[bytes]) -> None:
    """Add a complete delta to `mirror`, in place. Not idempotent.

    Every part is checked and every tile decoded before the first write: CorruptPart, for damaged parts and
    for parts made for another model, leaves the mirror as it was. Names that share one memory (tied
    weights) are changed once. Raises ValueError when an array is read-only, not contiguous or overlaps
    another in part.
    """
    delta = open_parts(parts, kind=PartKind.DELTA)
    _check_same_model(mirror, delta)
    flats = _flat_views(mirror)
    tiles = _without_aliases(delta, flats)
    decoded = _decoded(tiles, flats)
    for tile in tiles:
        elements = _slice(flats, tile)
        steps = decoded.pop((tile.spec.name, tile.start), None)
        (steps or tile_delta.decode_tile(tile, base=elements)).apply_to(elements)


def summarize_delta(parts: Sequence[bytes]) -> DeltaSummary:
    """Count what a complete delta changes. Raises CorruptPart."""
    delta = open_parts(parts, kind=PartKind.DELTA)
    return DeltaSummary(
        num_changed=sum(tile.num_changed for tile in delta.tiles),
        num_elements=sum(spec.num_elements for spec in delta.specs),
        size_bytes=sum(len(part) for part in parts),
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


def _check_same_model(mirror: Model, delta: PartSet) -> None:
    have = {spec.name: spec for spec in (spec_of(name, array) for name, array in mirror.items())}
    made_for = {spec.name: spec for spec in delta.specs}
    if have != made_for:
        name = min(name for name in have.keys() | made_for.keys() if have.get(name) != made_for.get(name))
        raise CorruptPart(
            f"the delta was made for another model: {name!r} is {made_for.get(name)}, not {have.get(name)}"
        )


def _without_aliases(delta: PartSet, flats: dict[str, npt.NDArray[Any]]) -> list[StoredTile]:
    """Tiles of every tensor but those whose memory another tensor already stands for."""
    owners = _owners(flats)
    contents: dict[str, list[tuple[object, ...]]] = {name: [] for name in owners}
    for tile in delta.tiles:
        contents[tile.spec.name].append(
            (tile.start, tile.num_elements, tile.codec, tile.num_changed, tile.params, tile.aux, tile.body)
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
