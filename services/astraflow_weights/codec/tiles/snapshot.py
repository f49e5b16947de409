"""How one tile of a snapshot is written and read.

Invariant: decoding fills exactly the elements that were encoded, or raises CorruptPart before it writes
one. `snapshot` calls `encode_tile` and `decode_tile`, nothing else; a denser codec is added here.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from astraflow_weights.codec.streams import Bytes, join_planes, pack, split_planes, unpack
from astraflow_weights.codec.tiles.grid import EncodedTile, StoredTile, TileCodec
from astraflow_weights.errors import CorruptPart

UInts = npt.NDArray[Any]
_BF16 = np.dtype("<u2")


def encode_tile(values: UInts, *, start: int) -> EncodedTile | None:
    """Smallest encoding of an unsigned tile at element `start`; None when all of it is zero."""
    if not values.any():
        return None
    codec = TileCodec.EXP_PLANE if values.dtype == _BF16 else TileCodec.XOR_ZSTD
    planes = _split_bf16(values) if values.dtype == _BF16 else split_planes(values)
    packed = pack(planes)
    if len(packed) < values.nbytes:
        return EncodedTile(start=start, num_elements=len(values), codec=codec, body=packed)
    return EncodedTile(start=start, num_elements=len(values), codec=TileCodec.RAW, body=values.tobytes())


def decode_tile(tile: StoredTile, *, out: UInts) -> None:
    """Write the tile's elements into `out`, which has its length and width. Raises CorruptPart."""
    try:
        out[:] = _values(tile)
    except CorruptPart as error:
        raise CorruptPart(f"{tile}: {error}") from error


def _values(tile: StoredTile) -> UInts:
    size_bytes = tile.num_elements * tile.dtype.itemsize
    if tile.codec is TileCodec.RAW and len(tile.body) == size_bytes:
        return np.frombuffer(tile.body, dtype=tile.dtype)
    if tile.codec is TileCodec.EXP_PLANE and tile.dtype == _BF16:
        return _join_bf16(*unpack(tile.body, lengths=[tile.num_elements] * 2))
    if tile.codec is TileCodec.XOR_ZSTD and tile.dtype != _BF16:
        return join_planes(
            unpack(tile.body, lengths=[tile.num_elements] * tile.dtype.itemsize), dtype=tile.dtype
        )
    raise CorruptPart(f"a body of {len(tile.body)} bytes cannot be this tile of a snapshot")


def _split_bf16(values: UInts) -> list[Bytes]:
    """Exponents, which compress, and signs with mantissas, which do not."""
    exponents = (values >> 7).astype(np.uint8)
    others = ((values >> 8) & 0x80).astype(np.uint8) | (values & 0x7F).astype(np.uint8)
    return [exponents, others]


def _join_bf16(exponents: Bytes, others: Bytes) -> UInts:
    wide = others.astype(_BF16)
    return ((wide & 0x80) << 8) | (exponents.astype(_BF16) << 7) | (wide & 0x7F)
