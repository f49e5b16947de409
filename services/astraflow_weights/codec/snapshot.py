"""Snapshots: a whole model in parts.

Invariant: decoding gives back every bit pattern, and allocates no more than the caller allows. Publisher
and mirror call it.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from astraflow_weights.codec.ordered import in_order
from astraflow_weights.codec.parts.format import TARGET_PART_BYTES
from astraflow_weights.codec.parts.reader import PartSet, open_parts
from astraflow_weights.codec.parts.writer import PartSetHead, Placed, write_parts
from astraflow_weights.codec.schema import Schema
from astraflow_weights.codec.shards import ShardedModel, whole
from astraflow_weights.codec.tensors import (
    DTYPE_BY_NAME,
    Array,
    Model,
    TensorSpec,
    flat_unsigned,
    tile_ranges,
)
from astraflow_weights.codec.tiles import snapshot as tile_snapshot
from astraflow_weights.codec.tiles.grid import EncodedTile, PartKind
from astraflow_weights.errors import CorruptPart

_MAX_MODEL_BYTES = 2**42


def encode_snapshot(model: Model, *, version: int = 0, part_bytes: int = TARGET_PART_BYTES) -> list[bytes]:
    """Parts holding the whole model: uint16 bit patterns (bfloat16), float32 or uint8 arrays.

    Deterministic. `version` is only written into the headers. Raises ValueError for other dtypes and an
    empty model.
    """
    held = whole(model)
    head = PartSetHead(kind=PartKind.SNAPSHOT, base_version=version, target_version=version)
    tiles = encode_snapshot_tiles(held)
    return list(write_parts(tiles, head=head, schema=Schema.of(held.specs), part_bytes=part_bytes))


def encode_snapshot_tiles(model: ShardedModel, *, threads: int = 1) -> Iterator[Placed]:
    """Tiles of one process's shards; what is zero has none."""

    def encode(place: tuple[TensorSpec, int, int]) -> EncodedTile | None:
        spec, start, count = place
        shard = model.shards[spec.name]
        values = shard.elements[start - shard.start : start - shard.start + count]
        return tile_snapshot.encode_tile(values, start=start)

    places = [
        (spec, start, count)
        for spec, shard in model.held()
        for start, count in tile_ranges(shard.stop, start=shard.start)
    ]
    tiles = in_order(encode, places, threads=threads, name="weights-encode")
    for (spec, _, _), tile in zip(places, tiles, strict=True):
        if tile is not None:
            yield spec, tile


def decode_snapshot(
    parts: Sequence[bytes], *, schema: Schema, max_bytes: int = _MAX_MODEL_BYTES
) -> dict[str, Array]:
    """Fresh arrays of the model in a complete snapshot, sorted by name.

    Raises CorruptPart for damaged or incomplete parts and for tensors of more than `max_bytes` in total.
    """
    snapshot = open_parts(parts, kind=PartKind.SNAPSHOT, schema=schema)
    size_bytes = sum(spec.size_bytes for spec in schema.specs)
    if size_bytes > max_bytes:
        raise CorruptPart(f"the snapshot unfolds to {size_bytes} bytes; the limit is {max_bytes}")
    return _decoded(snapshot)


def _decoded(snapshot: PartSet) -> dict[str, Array]:
    model = {
        spec.name: np.zeros(spec.shape, dtype=DTYPE_BY_NAME[spec.dtype].array)
        for spec in snapshot.schema.specs
    }
    flats = {name: flat_unsigned(array) for name, array in model.items()}
    for tile in snapshot.tiles:
        tile_snapshot.decode_tile(
            tile, out=flats[tile.spec.name][tile.start : tile.start + tile.num_elements]
        )
    return model
