# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The kernels of `change_kernels`, in Triton's language, which has no types. Imports triton.

Shape legend: BLOCK elements of a program, LANES of them a word of marks.
"""

import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]


@triton.jit
def num_ones(words):
    """Bits that are set, of each uint32 (Hacker's Delight, figure 5-2)."""
    pairs = words - ((words >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    return (((fours + (fours >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@triton.jit
def mark(new, old, marks, counts, count, BLOCK: tl.constexpr, LANES: tl.constexpr) -> None:
    """Bit i of word w of `marks` says whether element w · LANES + i differs; `counts` has how many of a block do."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    before = tl.load(old + at, mask=inside, other=0)
    after = tl.load(new + at, mask=inside, other=0)
    differs = tl.reshape((before != after).to(tl.uint32), (BLOCK // LANES, LANES))
    words = tl.sum(differs << tl.arange(0, LANES).to(tl.uint32)[None, :], axis=1)
    word_at = tl.program_id(0) * (BLOCK // LANES) + tl.arange(0, BLOCK // LANES)
    tl.store(marks + word_at, words.to(tl.int32, bitcast=True))
    tl.store(counts + tl.program_id(0), tl.sum(num_ones(words), axis=0).to(tl.int32))


@triton.jit
def gather(new, old, marks, ends, counts, positions, steps, BLOCK: tl.constexpr, LANES: tl.constexpr) -> None:
    """Where marked elements are, ascending, and new less old, wrapped."""
    block, inside = tl.program_id(0), tl.arange(0, BLOCK // LANES)
    word_at = block * (BLOCK // LANES) + inside
    words = tl.load(marks + word_at).to(tl.uint32, bitcast=True)
    num_marked = num_ones(words).to(tl.int32)
    place = tl.load(ends + block) - tl.load(counts + block) + tl.cumsum(num_marked, 0) - num_marked
    for _ in range(tl.max(num_marked, axis=0)):
        chosen = words != 0
        rest = words & (words - 1)
        at = word_at * LANES + num_ones((words ^ rest) - 1).to(tl.int32)
        after = tl.load(new + at, mask=chosen, other=0)
        before = tl.load(old + at, mask=chosen, other=0)
        tl.store(positions + place, at, mask=chosen)
        tl.store(steps + place, after - before, mask=chosen)
        words, place = rest, place + 1
