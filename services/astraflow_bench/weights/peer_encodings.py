"""The encodings that other systems ship weight deltas in, written anew for comparison.

Invariant: each is lossless and complete: `decode(encode(base, target))` applied to the base gives the target, which
the benchmark checks. Work is done tile by tile, as those systems do it chunk by chunk, on one thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import zstandard

Bits = npt.NDArray[np.uint16]
_LEVEL = 1


@dataclass(frozen=True)
class PeerEncoding:
    """One way to ship a delta. `encode` gives the bytes, `apply` changes the base in place."""

    name: str
    shipped_by: str
    encode: Callable[[Bits, Bits], list[bytes]]
    apply: Callable[[Bits, Sequence[bytes]], None]
    is_flat: bool = False
    """All tensors in one buffer of positions and values, with one header; else streams of their own for each tensor."""
    is_dense: bool = False
    """Tensors that did not change are sent, too."""


def _coo(base: Bits, target: Bits) -> list[bytes]:
    positions = np.flatnonzero(base != target).astype(np.uint32)
    return [positions.tobytes(), target[positions].tobytes()]


def _apply_coo(base: Bits, streams: Sequence[bytes]) -> None:
    base[np.frombuffer(streams[0], np.uint32)] = np.frombuffer(streams[1], np.uint16)


def _packed_coo(base: Bits, target: Bits) -> list[bytes]:
    return [_pack(stream) for stream in _coo(base, target)]


def _apply_packed_coo(base: Bits, streams: Sequence[bytes]) -> None:
    _apply_coo(base, [_unpack(stream) for stream in streams])


def _dense_xor(base: Bits, target: Bits) -> list[bytes]:
    return [_pack((base ^ target).tobytes())]


def _apply_dense_xor(base: Bits, streams: Sequence[bytes]) -> None:
    np.bitwise_xor(base, np.frombuffer(_unpack(streams[0]), np.uint16), out=base)


def _gaps_xor(base: Bits, target: Bits) -> list[bytes]:
    """Gaps as u16; a gap beyond that is bridged by an entry that changes nothing, as the pattern 0."""
    positions = np.flatnonzero(base != target)
    gaps = np.diff(positions, prepend=-1)
    bridges = (gaps - 1) // 0xFFFF
    ends = np.cumsum(bridges + 1) - 1
    narrow = np.full(int(bridges.sum()) + len(gaps), 0xFFFF, np.uint16)
    values = np.zeros(len(narrow), np.uint16)
    narrow[ends] = gaps - bridges * 0xFFFF
    values[ends] = base[positions] ^ target[positions]
    return [_pack(narrow.tobytes()), _pack(values.tobytes())]


def _apply_gaps_xor(base: Bits, streams: Sequence[bytes]) -> None:
    gaps, values = (np.frombuffer(_unpack(stream), np.uint16) for stream in streams)
    positions = np.cumsum(gaps.astype(np.int64)) - 1
    base[positions] ^= values


def _pack(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL).compress(data)


def _unpack(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


PEERS = (
    PeerEncoding("COO", "AstraFlow (published), verl", _coo, _apply_coo, is_flat=True),
    PeerEncoding("COO + zstd-1", "", _packed_coo, _apply_packed_coo, is_flat=True),
    PeerEncoding("dense XOR + zstd-1", "slime, Miles, SkyRL", _dense_xor, _apply_dense_xor, is_dense=True),
    PeerEncoding("u16 gaps + XOR + zstd-1", "NeMo-RL", _gaps_xor, _apply_gaps_xor),
)
