"""Snapshots: a whole model in parts.

Invariant: decoding gives back every bit pattern, and allocates no more than the caller allows. Publisher
and mirror call it.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from astraflow_weights.codec.parts.format import TARGET_PART_BYTES
from astraflow_weights.codec.parts.reader import PartSet, open_parts
from astraflow_weights.codec.parts.writer import PartSetHead, Placed, write_parts
from astraflow_weights.codec.shards import ShardedModel, whole
from astraflow_weights.codec.tensors import (
    DTYPE_BY_NAME,
    Array,
    Model,
    flat_unsigned,
    tile_ranges,
)
from astraflow_weights.codec.tiles import snapshot as tile_snapshot
from astraflow_weights.codec.tiles.grid import PartKind
from astraflow_weights.errors import CorruptPart

_MAX_MODEL_BYTES = 2**42


def encode_snapshot(model: Model, *, version: int = 0, part_bytes: int = TARGET_PART_BYTES) -> list[bytes]:
    """Parts holding the whole model: uint16 bit patterns (bfloat16), float32 or uint8 arrays.

    Deterministic. `version` is only written into the headers. Raises ValueError for other dtypes and an
    empty model.
    """
    held = whole(model)
    head = PartSetHead(kind=PartKind.SNAPSHOT, base_version=version, target_version=version)
    return write_parts(encode_snapshot_tiles(held), head=head, specs=held.specs, part_bytes=part_bytes)


def encode_snapshot_tiles(model: ShardedModel) -> Iterator[Placed]:
    """Tiles of one process's shards."""
    for spec, shard in model.held():
        if not spec.num_elements:
            yield spec, None
        for start, count in tile_ranges(shard.stop, start=shard.start):
            values = shard.elements[start - shard.start : start - shard.start + count]
            yield spec, tile_snapshot.encode_tile(values, start=start)


def decode_snapshot(parts: Sequence[bytes], *, max_bytes: int = _MAX_MODEL_BYTES) -> dict[str, Array]:
    """Fresh arrays of the model in a complete snapshot, sorted by name.

    Raises CorruptPart for damaged or incomplete parts and for tensors of more than `max_bytes` in total.
    """
    snapshot = open_parts(parts, kind=PartKind.SNAPSHOT)
    size_bytes = sum(spec.size_bytes for spec in snapshot.specs)
    if size_bytes > max_bytes:
        raise CorruptPart(f"the snapshot unfolds to {size_bytes} bytes; the limit is {max_bytes}")
    return _decoded(snapshot)


def _decoded(snapshot: PartSet) -> dict[str, Array]:
    model = {
        spec.name: np.empty(spec.shape, dtype=DTYPE_BY_NAME[spec.dtype].array) for spec in snapshot.specs
    }
    flats = {name: flat_unsigned(array) for name, array in model.items()}
    for tile in snapshot.tiles:
        tile_snapshot.decode_tile(
            tile, out=flats[tile.spec.name][tile.start : tile.start + tile.num_elements]
        )
    return model
