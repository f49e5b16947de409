"""How one tile of a delta is written and read: which codec, and the checks they share.

Invariant: decoding yields exactly the differences that were encoded, or raises CorruptPart; it never reads or
allocates beyond what the tile's size allows. bfloat16 tiles differ by wrapped subtraction, tiles of other
dtypes by exclusive or: both add up and invert without the base. `delta` and `merge` call it.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from astraflow_weights.codec import context as exponents
from astraflow_weights.codec import kernel, rice
from astraflow_weights.codec.kernel import NUM_CLASSES, U16, U32
from astraflow_weights.codec.rice import Changes
from astraflow_weights.codec.streams import join_planes, pack, split_planes, unpack
from astraflow_weights.codec.tiles.grid import EncodedTile, Steps, StoredTile, TileCodec
from astraflow_weights.errors import CorruptPart

UInts = npt.NDArray[Any]
BF16 = np.dtype("<u2")


def encode_tile(
    base: UInts, target: UInts, *, start: int, context: bool, changes: tuple[U32, U16] | None = None
) -> EncodedTile | None:
    """Smallest encoding of the path from `base` to `target` (equal-length unsigned tiles at element `start`); None
    when they are equal.

    `context` allows RICE_CTX, which is smaller and whose decoder needs the base's values. `changes` are what
    `scan` would find in a bfloat16 tile.
    """
    if base.dtype != BF16:
        return _encode_bits(base ^ target, start=start)
    positions, steps = changes or scan(base, target)
    plain = encode_steps(positions, steps, start=start, num_elements=len(base))
    if not context or plain is None:
        return plain
    first = exponents.first_exponent(base)
    body = rice.encode(exponents.rank(base, target, first=first))
    if len(body) >= len(plain.body):
        return plain
    return EncodedTile(
        start=start,
        num_elements=len(base),
        codec=TileCodec.RICE_CTX,
        num_changed=len(positions),
        body=body,
        first_exponent=first,
    )


def encode_steps(positions: U32, steps: U16, *, start: int, num_elements: int) -> EncodedTile | None:
    """Smallest encoding of a bfloat16 tile whose changes are known; no base is needed to read it."""
    if not len(positions):
        return None
    body = rice.encode(
        Changes(
            ranks=positions,
            steps=steps,
            counts=np.array([len(positions)], np.uint32),
            populations=np.array([num_elements], np.uint32),
        )
    )
    codec = TileCodec.RICE
    if len(body) >= num_elements * BF16.itemsize:
        dense = np.zeros(num_elements, BF16)
        dense[positions] = steps
        codec, body = TileCodec.RAW, dense.tobytes()
    return EncodedTile(
        start=start, num_elements=num_elements, codec=codec, num_changed=len(positions), body=body
    )


def decode_tile(tile: StoredTile, *, base: UInts | None) -> Steps:
    """Differences from `base` (the tile's elements before the delta, left unchanged) to the target.

    Only RICE_CTX reads `base`; it may be None for every other codec. Raises CorruptPart.
    """
    try:
        steps = _decode(tile, base)
    except CorruptPart as error:
        raise CorruptPart(f"{tile}: {error}") from error
    changed = int(np.count_nonzero(steps.values))
    if changed != tile.num_changed:
        raise CorruptPart(f"{tile} says {tile.num_changed} changes and holds {changed}")
    return steps


def scan(base: U16, target: U16) -> tuple[U32, U16]:
    """Ascending positions of the elements that differ, and their wrapped steps."""
    compiled = kernel.active()
    if compiled is not None:
        return compiled.scan(np.ascontiguousarray(base), np.ascontiguousarray(target))
    positions = _different(base, target)
    return positions.astype(np.uint32), target[positions] - base[positions]


def _different(base: U16, target: U16) -> npt.NDArray[np.int64]:
    """Positions that differ; four elements are compared at once, for most words are equal."""
    whole = len(base) // 4 * 4
    left = np.ascontiguousarray(base[:whole]).view(np.uint64)
    right = np.ascontiguousarray(target[:whole]).view(np.uint64)
    words = np.flatnonzero(left != right)
    inside = np.flatnonzero((left[words] ^ right[words]).view(np.uint16))
    tail = whole + np.flatnonzero(base[whole:] != target[whole:])
    return np.concatenate([words[inside >> 2] * 4 + (inside & 3), tail])


def _encode_bits(bits: UInts, *, start: int) -> EncodedTile | None:
    """A tile of a dtype other than bfloat16, from the exclusive or of both sides."""
    count = int(np.count_nonzero(bits))
    if not count:
        return None
    packed = pack(split_planes(bits))
    codec, body = TileCodec.XOR_ZSTD, packed
    if len(packed) >= bits.nbytes:
        codec, body = TileCodec.RAW, bits.tobytes()
    return EncodedTile(start=start, num_elements=len(bits), codec=codec, num_changed=count, body=body)


def _decode(tile: StoredTile, base: UInts | None) -> Steps:
    width = tile.dtype.itemsize
    if tile.codec is TileCodec.RAW:
        if len(tile.body) != tile.num_elements * width:
            raise CorruptPart(f"body has {len(tile.body)} bytes where {tile.num_elements * width} are needed")
        return Steps(values=np.frombuffer(tile.body, tile.dtype))
    if tile.codec is TileCodec.XOR_ZSTD and tile.dtype != BF16:
        planes = unpack(tile.body, lengths=[tile.num_elements] * width)
        return Steps(values=join_planes(planes, dtype=tile.dtype))
    if tile.codec is TileCodec.RICE and tile.dtype == BF16:
        return _decode_rice(tile)
    if tile.codec is TileCodec.RICE_CTX and tile.dtype == BF16 and base is not None:
        return _decode_context(tile, base)
    raise CorruptPart(f"a {tile.codec.name} tile of {tile.spec.dtype} cannot stand in a delta")


def _decode_rice(tile: StoredTile) -> Steps:
    populations = np.array([tile.num_elements], np.uint32)
    changes = rice.decode(tile.body, populations=populations, num_elements=tile.num_elements)
    return Steps(values=changes.steps, positions=changes.ranks)


def _decode_context(tile: StoredTile, base: U16) -> Steps:
    populations = np.full(NUM_CLASSES, tile.num_elements, np.uint32)
    changes = rice.decode(tile.body, populations=populations, num_elements=tile.num_elements)
    if len(changes.ranks) != tile.num_changed:
        raise CorruptPart(f"holds {len(changes.ranks)} changes where {tile.num_changed} are announced")
    positions, steps = exponents.locate(np.ascontiguousarray(base), changes, first=tile.first_exponent)
    return Steps(values=steps, positions=positions)
