"""Rice coding of sparse steps: which elements of one or more classes changed, and by how much.

Invariant: `decode` gives back exactly the ranks and steps that `encode` was given, or raises CorruptPart
without having allocated more than the tile's size allows. What a class is, `context` knows; a tile without
context is one class. `tile_delta` calls it.

A body is a head and seven bit planes. The head is made of varints: the bytes of the planes GAP_Q, RUN_Q and
SIZE_Q (those of the others follow from what was read), then per class its number of changes and, unless that
is 0, a byte `gap_bits | mode << 5`, a byte `size_bits`, and in mode 0 the number of exceptions.

* gap: the number of unchanged elements of the class before a change, Rice-coded with `gap_bits`.
* sign: one bit per change, set when the step is negative.
* mode 0: steps beyond one unit are exceptions: the number of other changes of the class before it, Rice-coded
  with `size_bits`, and the size less 2 in exp-Golomb of order 0. Mode 1: every step's size less 1 in
  exp-Golomb of order `size_bits`.

Rice parameters after R. F. Rice, "Some practical universal noiseless coding techniques", JPL 79-22 (1979).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from astraflow_weights.codec import kernel
from astraflow_weights.codec.kernel import CLASS_CODE, U16, U32, Bytes, ClassCodes
from astraflow_weights.codec.planes import (
    Ints,
    pack_unary,
    pack_widths,
    read_varint,
    unpack_unary,
    unpack_widths,
    write_varint,
)
from astraflow_weights.errors import CorruptPart

_LISTED, _SIZED = 0, 1
_MAX_GAP_BITS = 21
_MAX_SIZE_BITS = 15
_GAP_Q, _GAP_R, _SIGN, _RUN_Q, _RUN_R, _SIZE_Q, _SIZE_R = range(kernel.NUM_PLANES)


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Changed elements grouped by class: `ranks` ascend inside a class, `steps` are wrapped differences."""

    ranks: U32
    steps: U16
    counts: U32
    """Changes of each class."""
    populations: U32
    """Elements of each class."""


def encode(changes: Changes) -> bytes:
    """The body of a tile with at least one change. Deterministic; the same with and without the kernel."""
    codes = _codes(changes)
    planes = _pack(changes, codes)
    head = [len(planes[_GAP_Q]), len(planes[_RUN_Q]), len(planes[_SIZE_Q])]
    return b"".join((*map(write_varint, head), *map(_class_head, codes), *map(bytes, planes)))


def decode(body: memoryview, *, populations: U32, num_elements: int) -> Changes:
    """Read the body of a tile of `num_elements`, whose classes have at most `populations`. Raises CorruptPart."""
    codes, planes = _open(body, populations=populations)
    _check_room(codes, planes, num_elements=num_elements)
    compiled = kernel.active()
    if compiled is None:
        ranks, steps = _unpack(planes, codes)
    else:
        unpacked = compiled.unpack(planes, codes)
        if isinstance(unpacked, kernel.Status):
            raise CorruptPart(f"its bit planes do not fit together: {unpacked.name.lower()}")
        ranks, steps = unpacked
    return Changes(ranks=ranks, steps=steps, counts=codes["count"].copy(), populations=populations)


def magnitudes(steps: U16) -> Ints:
    """Sizes of wrapped steps, 1 to 32768."""
    return np.abs(steps.view(np.int16).astype(np.int64))


# ---------------------------------------------------------------- parameters


def _codes(changes: Changes) -> ClassCodes:
    """The cheapest parameters of each class: exact costs of a few candidates around the mean are compared."""
    codes = np.zeros(len(changes.counts), CLASS_CODE)
    codes["count"], codes["population"] = changes.counts, changes.populations
    compiled = kernel.active()
    if compiled is not None:
        compiled.choose(changes.ranks, changes.steps, codes)
        return codes
    ends = np.cumsum(changes.counts.astype(np.int64))
    for code, end in zip(codes, ends.tolist(), strict=True):
        span = slice(end - int(code["count"]), end)
        if code["count"]:
            _choose(code, changes.ranks[span].astype(np.int64), magnitudes(changes.steps[span]))
    return codes


def _choose(code: np.void, ranks: Ints, sizes: Ints) -> None:
    gaps = np.diff(ranks, prepend=-1) - 1
    code["gap_bits"], _ = _cheapest_rice(gaps, int(code["population"]), most=_MAX_GAP_BITS)
    listed = np.flatnonzero(sizes > 1)
    code["exceptions"] = len(listed)
    listed_cost = 0
    if len(listed):
        runs = np.diff(listed, prepend=-1) - 1
        code["size_bits"], run_cost = _cheapest_rice(runs, len(sizes), most=_MAX_SIZE_BITS)
        listed_cost = run_cost + len(listed) + _size_cost(sizes[listed] - 2, 0)
    # Giving every step its size costs each a bit at least.
    if listed_cost > len(sizes):
        order, cost = _cheapest_order(sizes - 1)
        if cost < listed_cost:
            code["mode"], code["size_bits"], code["exceptions"] = _SIZED, order, 0


def _cheapest_rice(values: Ints, population: int, *, most: int) -> tuple[int, int]:
    """Parameter and bits, without the ending bits; the smallest of equals."""
    first = _first_candidate(population // len(values))
    candidates = [bits for bits in range(first, first + 3) if bits <= most]
    costs = [int((values >> bits).sum()) + len(values) * bits for bits in candidates]
    best = min(range(len(costs)), key=costs.__getitem__)
    return candidates[best], costs[best]


def _cheapest_order(values: Ints) -> tuple[int, int]:
    first = _first_candidate(int(values.sum()) // len(values))
    candidates = [order for order in range(first, first + 3) if order <= _MAX_SIZE_BITS]
    costs = [_size_cost(values, order) for order in candidates]
    best = min(range(len(costs)), key=costs.__getitem__)
    return candidates[best], costs[best]


def _size_cost(values: Ints, order: int) -> int:
    """Bits of exp-Golomb codes."""
    lengths = _bit_lengths(values + (1 << order)) - 1
    return int((2 * lengths + 1 - order).sum())


def _first_candidate(mean: int) -> int:
    return max(0, max(1, mean).bit_length() - 2)


# ---------------------------------------------------------------- head


def _class_head(code: np.void) -> bytes:
    count = int(code["count"])
    if not count:
        return write_varint(0)
    head = write_varint(count) + bytes([code["gap_bits"] | code["mode"] << 5, code["size_bits"]])
    return head + (write_varint(int(code["exceptions"])) if code["mode"] == _LISTED else b"")


def _open(body: memoryview, *, populations: U32) -> tuple[ClassCodes, list[Bytes]]:
    at, lengths = 0, []
    for _ in range(3):
        length, at = read_varint(body, at, limit=len(body))
        lengths.append(length)
    codes = np.zeros(len(populations), CLASS_CODE)
    codes["population"] = populations
    for code in codes:
        at = _read_class(body, at, code)
    return codes, _split(body[at:], codes, lengths=lengths)


def _read_class(body: memoryview, at: int, code: np.void) -> int:
    code["count"], at = read_varint(body, at, limit=int(code["population"]))
    if not code["count"]:
        return at
    if at + 2 > len(body):
        raise CorruptPart(f"the head of a tile's body is cut at byte {at} of {len(body)}")
    code["gap_bits"], code["mode"], code["size_bits"] = body[at] & 31, body[at] >> 5, body[at + 1]
    if code["gap_bits"] > _MAX_GAP_BITS or code["mode"] > _SIZED or code["size_bits"] > _MAX_SIZE_BITS:
        raise CorruptPart(f"a class is coded with parameters {bytes(body[at : at + 2]).hex()}, out of bounds")
    if code["mode"] == _LISTED:
        code["exceptions"], at = read_varint(body, at + 2, limit=int(code["count"]))
        return at
    return at + 2


def _split(body: memoryview, codes: ClassCodes, *, lengths: Sequence[int]) -> list[Bytes]:
    """Planes by length; the last takes what is left, and its reader refuses it when that is not right."""
    counts, listed = codes["count"].astype(np.int64), codes["mode"] == _LISTED
    gap_r = (int((counts * codes["gap_bits"]).sum()) + 7) // 8
    run_r = (int((codes["exceptions"].astype(np.int64) * codes["size_bits"])[listed].sum()) + 7) // 8
    sizes = [lengths[0], gap_r, (int(counts.sum()) + 7) // 8, lengths[1], run_r, lengths[2]]
    ends = np.cumsum([0, *sizes]).tolist()
    if ends[-1] > len(body):
        raise CorruptPart(
            f"planes of {ends[-1]} bytes do not fit into the {len(body)} bytes of a tile's body"
        )
    flat = np.frombuffer(body, np.uint8)
    return [flat[start:end] for start, end in zip(ends, [*ends[1:], len(flat)], strict=True)]


def _check_room(codes: ClassCodes, planes: Sequence[Bytes], *, num_elements: int) -> None:
    """Refuse more than any changes of a tile of this size can need, before room is made for what it unfolds to.

    Unary gaps and runs add up to elements and changes; a size takes 17 unary and 16 low bits at most.
    """
    changes = int(codes["count"].sum())
    if changes > num_elements:
        raise CorruptPart(f"it lists {changes} changes of {num_elements} elements")
    bits = {_GAP_Q: num_elements, _RUN_Q: changes, _SIZE_Q: 17 * changes, _SIZE_R: 16 * changes}
    for plane, most in bits.items():
        if len(planes[plane]) > (most + 7) // 8:
            raise CorruptPart(
                f"a plane of {len(planes[plane])} bytes is longer than {changes} changes of {num_elements} "
                "elements can need"
            )


# ---------------------------------------------------------------- planes


def _pack(changes: Changes, codes: ClassCodes) -> list[Bytes]:
    compiled = kernel.active()
    if compiled is None:
        return _pack_in_numpy(changes, codes)
    planes = compiled.pack(changes.ranks, changes.steps, codes, capacities=_capacities(codes))
    if planes is None:
        raise AssertionError("the bit planes do not fit the room that was computed for them")
    return planes


def _capacities(codes: ClassCodes) -> list[int]:
    """Upper bounds in bytes; pages that are not written to cost nothing."""
    counts, exceptions = codes["count"].astype(np.int64), codes["exceptions"].astype(np.int64)
    gap_q = int(((codes["population"].astype(np.int64) >> codes["gap_bits"]) + counts).sum())
    run_q = int(((counts >> codes["size_bits"]) + exceptions).sum())
    gap_r, run_r = int((counts * codes["gap_bits"]).sum()), int((exceptions * codes["size_bits"]).sum())
    sized = int(np.where(codes["mode"] == _SIZED, counts, exceptions).sum())
    bits = (gap_q, gap_r, int(counts.sum()), run_q, run_r, 17 * sized, 16 * sized)
    return [count // 8 + 8 for count in bits]


def _pack_in_numpy(changes: Changes, codes: ClassCodes) -> list[Bytes]:
    classes = np.repeat(np.arange(len(codes)), codes["count"])
    gaps = _gaps(changes.ranks.astype(np.int64), codes["count"])
    gap_bits = codes["gap_bits"].astype(np.int64)[classes]
    sizes = magnitudes(changes.steps)
    sized = codes["mode"][classes] == _SIZED
    listed = np.flatnonzero(~sized & (sizes > 1))
    runs = _gaps(_inside(listed, classes, codes), codes["exceptions"])
    run_bits = codes["size_bits"].astype(np.int64)[classes[listed]]
    chosen = np.flatnonzero(sized | (sizes > 1))
    orders = np.where(sized[chosen], codes["size_bits"][classes[chosen]], 0).astype(np.int64)
    values = sizes[chosen] - np.where(sized[chosen], 1, 2) + (1 << orders)
    lengths = _bit_lengths(values) - 1
    return [
        pack_unary(gaps >> gap_bits),
        pack_widths(gaps, gap_bits),
        np.packbits(changes.steps >> 15 != 0, bitorder="little"),
        pack_unary(runs >> run_bits),
        pack_widths(runs, run_bits),
        pack_unary(lengths - orders),
        pack_widths(values, lengths),
    ]


def _unpack(planes: Sequence[Bytes], codes: ClassCodes) -> tuple[U32, U16]:
    counts = codes["count"].astype(np.int64)
    classes = np.repeat(np.arange(len(codes)), counts)
    gap_bits = codes["gap_bits"].astype(np.int64)[classes]
    gaps = (unpack_unary(planes[_GAP_Q], count=len(classes)) << gap_bits) + unpack_widths(
        planes[_GAP_R], gap_bits
    )
    ranks = _ascending(gaps, codes["count"])
    if (ranks >= codes["population"][classes]).any():
        raise CorruptPart("it changes elements that its class does not have")
    signs = unpack_widths(planes[_SIGN], np.ones(len(classes), np.int64))
    sizes = _unpack_sizes(planes, codes, classes)
    if (sizes > 0x7FFF + signs).any():
        raise CorruptPart("it holds a step beyond 32767 units")
    steps = np.where(signs == 1, -sizes, sizes).astype(np.int16).view(np.uint16)
    return ranks.astype(np.uint32), steps


def _unpack_sizes(planes: Sequence[Bytes], codes: ClassCodes, classes: Ints) -> Ints:
    """Sizes of all steps, int64[changes]; 1 where nothing says otherwise."""
    owners = np.repeat(np.arange(len(codes)), codes["exceptions"])
    run_bits = codes["size_bits"].astype(np.int64)[owners]
    runs = (unpack_unary(planes[_RUN_Q], count=len(owners)) << run_bits) + unpack_widths(
        planes[_RUN_R], run_bits
    )
    inside = _ascending(runs, codes["exceptions"])
    if (inside >= codes["count"][owners]).any():
        raise CorruptPart("it lists an exception behind the last change of its class")
    sized = codes["mode"][classes] == _SIZED
    starts = np.cumsum(codes["count"].astype(np.int64)) - codes["count"]
    chosen = np.sort(np.concatenate([np.flatnonzero(sized), starts[owners] + inside]))
    orders = np.where(sized[chosen], codes["size_bits"][classes[chosen]], 0).astype(np.int64)
    lengths = unpack_unary(planes[_SIZE_Q], count=len(chosen)) + orders
    if (lengths > 16).any():
        raise CorruptPart("it holds a step of more than 16 bits")
    values = (1 << lengths) | unpack_widths(planes[_SIZE_R], lengths)
    sizes = np.ones(len(classes), np.int64)
    sizes[chosen] = values - (1 << orders) + np.where(sized[chosen], 1, 2)
    return sizes


def _gaps(ascending: Ints, counts: U32) -> Ints:
    """How many lie between neighbours, beginning anew with each class."""
    gaps = np.diff(ascending, prepend=-1) - 1
    firsts = _firsts(counts)
    gaps[firsts] = ascending[firsts]
    return gaps


def _ascending(gaps: Ints, counts: U32) -> Ints:
    """The inverse of `_gaps`."""
    totals = np.cumsum(gaps + 1)
    firsts = _firsts(counts)
    before = totals[firsts] - gaps[firsts] - 1
    ascending: Ints = totals - 1 - np.repeat(before, counts[counts > 0])
    return ascending


def _firsts(counts: U32) -> Ints:
    """Index of the first change of each class that has one."""
    starts = np.cumsum(counts.astype(np.int64)) - counts
    firsts: Ints = starts[counts > 0]
    return firsts


def _inside(indices: Ints, classes: Ints, codes: ClassCodes) -> Ints:
    """Indices among the changes of their class."""
    starts = np.cumsum(codes["count"].astype(np.int64)) - codes["count"]
    inside: Ints = indices - starts[classes[indices]]
    return inside


def _bit_lengths(values: Ints) -> Ints:
    """Bits that positive numbers below 2^53 take; exact, as frexp is."""
    lengths: Ints = np.frexp(values.astype(np.float64))[1].astype(np.int64)
    return lengths
