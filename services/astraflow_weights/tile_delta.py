"""How one tile of a delta is written and read: the seam where further codecs are added.

Invariant: decoding yields exactly the wrapped differences that were encoded, or raises CorruptPart; it
never reads or allocates beyond what the tile's size allows. `delta` calls `encode_tile` and `decode_tile`,
nothing else.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from astraflow_weights.errors import CorruptPart
from astraflow_weights.streams import Bytes, join_planes, pack, split_planes, unpack
from astraflow_weights.tiles import EncodedTile, Steps, StoredTile, TileCodec

# Gaps are written as bytes with an escape, or as u16 or u32; the tile's first parameter says which.
_GAP_BYTES, _GAP_U16, _GAP_U32 = 0, 1, 2
_GAP_DTYPES: Mapping[int, np.dtype[Any]] = {_GAP_U16: np.dtype("<u2"), _GAP_U32: np.dtype("<u4")}
_ESCAPE = 255
# Outside these shares of changed elements a codec cannot win and is not tried.
_SPARSE_AT_MOST = 0.6
_DENSE_AT_LEAST = 0.05

UInts = npt.NDArray[Any]
Positions = npt.NDArray[np.int64]


def encode_tile(base: UInts, target: UInts, *, start: int, context: bool) -> EncodedTile:
    """Smallest encoding of `target - base` (equal-length unsigned tiles at element `start`).

    `context` allows codecs whose decoder needs the base's values; there is none yet, so it changes nothing.
    """
    del context
    steps = target - base
    positions = np.flatnonzero(steps)
    if not len(positions):
        return EncodedTile(start=start, num_elements=len(steps), codec=TileCodec.ZERO)
    density = len(positions) / len(steps)
    candidates = [_raw(steps, positions, start=start)]
    if density >= _DENSE_AT_LEAST:
        candidates.append(_raw_zstd(steps, positions, start=start))
    if density <= _SPARSE_AT_MOST:
        candidates.append(_gap_zstd(steps, positions, start=start))
    return min(candidates, key=lambda tile: len(tile.body))


def decode_tile(tile: StoredTile, *, base: UInts) -> Steps:
    """Steps from `base` (the tile's elements before the delta, left unchanged) to the target. Raises
    CorruptPart.
    """
    decode = _DECODERS.get(tile.codec)
    if decode is None:
        raise CorruptPart(f"{tile} cannot stand in a delta")
    try:
        steps = decode(tile, base)
    except CorruptPart as error:
        raise CorruptPart(f"{tile}: {error}") from error
    _check_count(tile, steps)
    return steps


def _check_count(tile: StoredTile, steps: Steps) -> None:
    num_changed = int(np.count_nonzero(steps.values))
    if num_changed != tile.num_changed or (steps.positions is not None and num_changed != len(steps.values)):
        raise CorruptPart(
            f"{tile} says {tile.num_changed} changes and holds {num_changed} steps other than zero"
        )


def _raw(steps: UInts, positions: Positions, *, start: int) -> EncodedTile:
    return EncodedTile(
        start=start,
        num_elements=len(steps),
        codec=TileCodec.RAW,
        num_changed=len(positions),
        body=steps.tobytes(),
    )


def _raw_zstd(steps: UInts, positions: Positions, *, start: int) -> EncodedTile:
    return EncodedTile(
        start=start,
        num_elements=len(steps),
        codec=TileCodec.RAW_ZSTD,
        num_changed=len(positions),
        body=pack(split_planes(_zigzag(steps))),
    )


def _gap_zstd(steps: UInts, positions: Positions, *, start: int) -> EncodedTile:
    mode, gaps = _encode_gaps(np.diff(positions, prepend=-1) - 1)
    return EncodedTile(
        start=start,
        num_elements=len(steps),
        codec=TileCodec.GAP_ZSTD,
        num_changed=len(positions),
        body=pack([*gaps, *split_planes(_zigzag(steps[positions]))]),
        params=(mode, 0, 0),
        aux=len(gaps[0]),
    )


def _encode_gaps(gaps: Positions) -> tuple[int, list[Bytes]]:
    """Narrowest of the three forms, as planes."""
    escapes = gaps // _ESCAPE
    sizes = {
        _GAP_BYTES: len(gaps) + int(escapes.sum()),
        _GAP_U16: 2 * len(gaps) if gaps.max() < 2**16 else 2**62,
        _GAP_U32: 4 * len(gaps),
    }
    mode = min(sizes, key=lambda candidate: (sizes[candidate], candidate))
    if mode == _GAP_BYTES:
        return mode, [_escaped_bytes(gaps, escapes, length=sizes[mode])]
    return mode, split_planes(gaps.astype(_GAP_DTYPES[mode]))


def _escaped_bytes(gaps: Positions, escapes: Positions, *, length: int) -> Bytes:
    stream = np.full(length, _ESCAPE, dtype=np.uint8)
    stream[np.cumsum(escapes + 1) - 1] = gaps % _ESCAPE
    return stream


def _decode_raw(tile: StoredTile, base: UInts) -> Steps:
    expected = tile.num_elements * base.dtype.itemsize
    if len(tile.body) != expected:
        raise CorruptPart(f"body has {len(tile.body)} bytes where {expected} are needed")
    return Steps(values=np.frombuffer(tile.body, dtype=base.dtype))


def _decode_zero(tile: StoredTile, base: UInts) -> Steps:
    if len(tile.body):
        raise CorruptPart(f"body has {len(tile.body)} bytes where none are needed")
    return Steps(values=np.empty(0, dtype=base.dtype), positions=np.empty(0, dtype=np.int64))


def _decode_raw_zstd(tile: StoredTile, base: UInts) -> Steps:
    planes = unpack(tile.body, lengths=[tile.num_elements] * base.dtype.itemsize)
    return Steps(values=_unzigzag(join_planes(planes, dtype=base.dtype)))


def _decode_gap_zstd(tile: StoredTile, base: UInts) -> Steps:
    count, width = tile.num_changed, base.dtype.itemsize
    if not 1 <= count <= tile.num_elements:
        raise CorruptPart(f"{count} changes cannot be in {tile.num_elements} elements")
    gap_lengths = _gap_lengths(tile)
    streams = unpack(tile.body, lengths=[*gap_lengths, *([count] * width)])
    gaps = _decode_gaps(streams[: len(gap_lengths)], mode=tile.params[0], count=count)
    positions = np.cumsum(gaps + 1) - 1
    if positions[-1] >= tile.num_elements:
        raise CorruptPart(f"changes element {positions[-1]} of {tile.num_elements}")
    values = _unzigzag(join_planes(streams[len(gap_lengths) :], dtype=base.dtype))
    return Steps(values=values, positions=positions)


def _gap_lengths(tile: StoredTile) -> list[int]:
    mode, length = tile.params[0], tile.aux
    if mode == _GAP_BYTES:
        longest = tile.num_changed + tile.num_elements // _ESCAPE
        if not tile.num_changed <= length <= longest:
            raise CorruptPart(f"{length} gap bytes where {tile.num_changed} to {longest} are possible")
        return [length]
    if mode not in _GAP_DTYPES or length != tile.num_changed:
        raise CorruptPart(f"gap form {mode} with {length} gaps is not understood")
    return [length] * _GAP_DTYPES[mode].itemsize


def _decode_gaps(planes: list[Bytes], *, mode: int, count: int) -> Positions:
    if mode != _GAP_BYTES:
        return join_planes(planes, dtype=_GAP_DTYPES[mode]).astype(np.int64)
    stream = planes[0]
    ends = np.flatnonzero(stream != _ESCAPE)
    if len(ends) != count or ends[-1] != len(stream) - 1:
        raise CorruptPart(f"gap bytes hold {len(ends)} gaps where {count} are needed")
    gaps: Positions = (np.diff(ends, prepend=-1) - 1) * _ESCAPE + stream[ends].astype(np.int64)
    return gaps


def _zigzag(steps: UInts) -> UInts:
    """Interleave negative and positive steps (0, -1, 1, -2 … become 0, 1, 2, 3 …), so small ones have small
    bytes.
    """
    bits = 8 * steps.dtype.itemsize
    signs = steps >> steps.dtype.type(bits - 1)
    codes: UInts = (steps << steps.dtype.type(1)) ^ (-signs)
    return codes


def _unzigzag(codes: UInts) -> UInts:
    one = codes.dtype.type(1)
    steps: UInts = (codes >> one) ^ (-(codes & one))
    return steps


_DECODERS: Mapping[TileCodec, Callable[[StoredTile, UInts], Steps]] = {
    TileCodec.RAW: _decode_raw,
    TileCodec.ZERO: _decode_zero,
    TileCodec.RAW_ZSTD: _decode_raw_zstd,
    TileCodec.GAP_ZSTD: _decode_gap_zstd,
}
