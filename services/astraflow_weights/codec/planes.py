"""Bit planes in numpy: unary numbers and numbers of given widths, least significant bit first.

Invariant: what is read was bound-checked against the plane, and reading allocates at most eight times the
plane. `rice` calls it where there is no compiled kernel; both make and take the same bytes.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from astraflow_weights.errors import CorruptPart

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
_TABLE_ROWS = 2**18


def pack_unary(values: Ints) -> Bytes:
    """Each value as that many zeros and a one."""
    if not len(values):
        return np.empty(0, np.uint8)
    ends = np.cumsum(values + 1) - 1
    bits = np.zeros(int(ends[-1]) + 1, np.uint8)
    bits[ends] = 1
    return np.packbits(bits, bitorder="little")


def unpack_unary(plane: Bytes, *, count: int) -> Ints:
    """The `count` values of a plane. Raises CorruptPart when it holds more, fewer, or a byte too many."""
    bits = np.unpackbits(plane, bitorder="little")
    held = int(np.count_nonzero(bits))
    # The table of positions is made only when it has the length that the caller expects.
    ends = np.flatnonzero(bits) if held == count else np.empty(0, np.int64)
    if held != count or len(plane) != (int(ends[-1]) // 8 + 1 if count else 0):
        raise CorruptPart(f"a plane of {len(plane)} bytes holds {held} numbers where {count} are needed")
    values: Ints = np.diff(ends, prepend=-1) - 1
    return values


def pack_widths(values: Ints, widths: Ints) -> Bytes:
    """The low `widths[i]` bits of each value, one after the other."""
    width = _common(widths)
    if width is not None:
        # The table of bits takes a number's size for each: small ones are several times faster.
        small: npt.NDArray[Any] = values.astype(np.uint8 if width <= 8 else np.uint32)
        table = (small[:, None] >> np.arange(width, dtype=small.dtype)) & 1
        return np.packbits(table.astype(np.uint8, copy=False), bitorder="little")
    starts = np.cumsum(widths) - widths
    bits = np.zeros(int(widths.sum()), np.uint8)
    for bit in range(int(widths.max(initial=0))):
        chosen = widths > bit
        bits[starts[chosen] + bit] = (values[chosen] >> bit) & 1
    return np.packbits(bits, bitorder="little")


def unpack_widths(plane: Bytes, widths: Ints) -> Ints:
    """Numbers of the given widths. Raises CorruptPart unless they fill the plane, up to zero bits at its end."""
    total = int(widths.sum())
    bits = np.unpackbits(plane, bitorder="little")
    if len(plane) != (total + 7) // 8 or bits[total:].any():
        raise CorruptPart(f"a plane of {len(plane)} bytes does not hold numbers of {total} bits in all")
    width = _common(widths)
    if width == 1:
        return bits[:total].astype(np.int64)
    if width is not None:
        table = bits[:total].reshape(len(widths), width).astype(np.float32)
        # Sums of powers of two below 2^24 are exact in float32, and this product is the fastest there is.
        return (table @ (2.0 ** np.arange(width)).astype(np.float32)).astype(np.int64)
    starts = np.cumsum(widths) - widths
    values = np.zeros(len(widths), np.int64)
    for bit in range(int(widths.max(initial=0))):
        chosen = widths > bit
        values[chosen] |= bits[starts[chosen] + bit].astype(np.int64) << bit
    return values


def _common(widths: Ints) -> int | None:
    """The width of all numbers, when they have one and the table of their bits is small."""
    if not len(widths) or len(widths) > _TABLE_ROWS or widths.min() != widths.max() or widths[0] > 23:
        return None
    return int(widths[0])


def read_varint(body: memoryview, at: int, *, limit: int) -> tuple[int, int]:
    """A base-128 number of at most `limit`, and where it ends. Raises CorruptPart."""
    value = shift = 0
    while True:
        if at >= len(body) or shift > 28:
            raise CorruptPart(
                f"the head of a tile's body of {len(body)} bytes is cut or damaged at byte {at}"
            )
        byte = body[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            break
    if value > limit:
        raise CorruptPart(f"the head of a tile's body says {value} where at most {limit} is possible")
    return value, at


def write_varint(value: int) -> bytes:
    """A number in base 128, least significant group first."""
    groups: list[Any] = []
    while value > 127:
        groups.append(value & 127 | 128)
        value >>= 7
    return bytes([*groups, value])
