"""Eight bits for a number: the dynamic type of arXiv 2110.02861, in blocks that end with their row.

Invariant: a block's largest magnitude is kept exactly, so that what was read and is written again keeps its codes;
where a type has no sign, nothing but 0 becomes 0. Plain torch, on any device, and no compiler at run time: torchao's
compiles its step for each shape and its blocks cross rows, bitsandbytes knows no DTensor. Called by `updates`.
"""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch.nn.functional import pad

BLOCK = 256
"""Numbers of a row that share one scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeBook:
    """256 levels in [-1, 1], ascending, and the borders between them."""

    levels: tuple[float, ...]
    borders: tuple[float, ...]
    """A number in (borders[i - 1], borders[i]] has code i."""

    @property
    def zero(self) -> int:
        """The code of 0."""
        return self.levels.index(0.0)


def _positive_levels(bits: int) -> list[float]:
    """2^bits - 1 levels in (0, 1): zeros in front say the power of ten, the bits that they leave count in [0.1, 1]."""
    levels = []
    for exponent in range(bits):
        count = 2 ** (bits - 1 - exponent)
        levels += [10.0**-exponent * (0.1 + 0.9 * (index + 0.5) / count) for index in range(count)]
    return sorted(levels)


def _code_book(levels: list[float], *, to_zero: bool) -> CodeBook:
    borders = [(low + high) / 2 for low, high in pairwise(levels)]
    if not to_zero:
        borders[0] = 0.0
    return CodeBook(levels=tuple(levels), borders=tuple(borders))


_HALF = _positive_levels(7)
SIGNED = _code_book([-1.0, *(-level for level in reversed(_HALF[:-1])), 0.0, *_HALF, 1.0], to_zero=True)
"""For first moments."""
ROOTS = _code_book([0.0, *_positive_levels(8)[:-1], 1.0], to_zero=False)
"""For roots of second moments."""


def blocks_of(columns: int) -> int:
    """Blocks of a row."""
    return -(-columns // BLOCK)


def dequantized(codes: torch.Tensor, scales: torch.Tensor, book: CodeBook) -> torch.Tensor:
    """float32 [..., columns] of codes uint8 [..., columns] and scales [..., blocks of columns]."""
    levels = _on_device(book.levels, codes.device)[codes.int()]
    scaled = _blocks(levels) * scales.unsqueeze(-1)
    return scaled.flatten(-2)[..., : codes.shape[-1]].contiguous()


def quantize_into(codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, book: CodeBook) -> None:
    """Write codes and scales of float32 [..., columns] in place."""
    blocks = _blocks(values)
    scales.copy_(blocks.abs().amax(-1))
    # A block of zeros alone is divided by the smallest number, and stays 0.
    normed = blocks / scales.unsqueeze(-1).clamp(min=torch.finfo(torch.float32).tiny)
    found = torch.bucketize(normed, _on_device(book.borders, codes.device), out_int32=True)
    codes.copy_(found.flatten(-2)[..., : codes.shape[-1]])


def _blocks(values: torch.Tensor) -> torch.Tensor:
    missing = -values.shape[-1] % BLOCK
    padded: torch.Tensor = pad(values, (0, missing)) if missing else values
    return padded.view(*values.shape[:-1], -1, BLOCK)


@cache
def _on_device(numbers: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32).to(device)
