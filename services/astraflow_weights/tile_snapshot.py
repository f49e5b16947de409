"""How one tile of a snapshot is written and read.

Invariant: decoding fills exactly the elements that were encoded, or raises CorruptPart before it writes
one. `snapshot` calls `encode_tile` and `decode_tile`, nothing else; a denser codec is added here.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from astraflow_weights.errors import CorruptPart
from astraflow_weights.streams import join_planes, pack, split_planes, unpack
from astraflow_weights.tiles import EncodedTile, StoredTile, TileCodec

UInts = npt.NDArray[Any]


def encode_tile(values: UInts, *, start: int) -> EncodedTile:
    """Smallest encoding of an unsigned tile at element `start`."""
    if not values.any():
        return EncodedTile(start=start, num_elements=len(values), codec=TileCodec.ZERO)
    packed = pack(split_planes(values))
    if len(packed) < values.nbytes:
        return EncodedTile(start=start, num_elements=len(values), codec=TileCodec.RAW_ZSTD, body=packed)
    return EncodedTile(start=start, num_elements=len(values), codec=TileCodec.RAW, body=values.tobytes())


def decode_tile(tile: StoredTile, *, out: UInts) -> None:
    """Write the tile's elements into `out`, which has its length and width. Raises CorruptPart."""
    try:
        out[:] = _values(tile, dtype=out.dtype)
    except CorruptPart as error:
        raise CorruptPart(f"{tile}: {error}") from error


def _values(tile: StoredTile, *, dtype: np.dtype[Any]) -> UInts:
    if tile.codec is TileCodec.RAW_ZSTD:
        return join_planes(unpack(tile.body, lengths=[tile.num_elements] * dtype.itemsize), dtype=dtype)
    if tile.codec is TileCodec.ZERO and not len(tile.body):
        return np.zeros(tile.num_elements, dtype=dtype)
    if tile.codec is TileCodec.RAW and len(tile.body) == tile.num_elements * dtype.itemsize:
        return np.frombuffer(tile.body, dtype=dtype)
    raise CorruptPart(f"a body of {len(tile.body)} bytes cannot be this tile of a snapshot")
