"""Which token prefix each cache row holds, so that a request can reuse keys and values instead of computing
them.

Invariant: what this index reports as held was computed under the current weights: a weight swap flushes it,
and a row whose request lived through a swap in place is never recorded. Rows are the slots of the static
cache, in use or not, so reuse needs no memory of its own; it serves samples of one prompt and later turns
of one conversation. Called by `runner.py` between passes; pure bookkeeping, no tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# A copy costs about as much as computing this many tokens.
_MIN_SHARED_TOKENS = 8


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The first `length` tokens of a request are held by `row`."""

    row: int
    length: int


class PrefixIndex:
    """The tokens held by each row. Not thread-safe."""

    def __init__(self, *, num_rows: int, capacity: int) -> None:
        self._tokens = np.zeros((num_rows, capacity), dtype=np.int32)
        self._lengths = np.zeros(num_rows, dtype=np.int64)
        self._last_used = np.zeros(num_rows, dtype=np.int64)
        self._spaces = [""] * num_rows
        self._tick = 0

    def length(self, row: int) -> int:
        """How many tokens of `row` may be reused."""
        return int(self._lengths[row])

    def record(self, row: int, *, tokens: Sequence[int], space: str) -> None:
        """`row` now holds the keys and values of exactly `tokens`."""
        self._tokens[row, : len(tokens)] = tokens
        self._lengths[row] = len(tokens)
        self._spaces[row] = space
        self._touch(row)

    def forget(self, row: int) -> None:
        """Nothing in `row` may be reused."""
        self._lengths[row] = 0

    def flush(self) -> None:
        """Nothing in any row may be reused."""
        self._lengths[:] = 0

    def exchange(self, first: int, second: int) -> None:
        """The contents of two rows were swapped."""
        for held in (self._tokens, self._lengths, self._last_used):
            held[[first, second]] = held[[second, first]]
        self._spaces[first], self._spaces[second] = self._spaces[second], self._spaces[first]

    def best_match(self, tokens: Sequence[int], *, space: str) -> PrefixMatch | None:
        """The row sharing the longest prefix with `tokens`; None when no row shares enough to pay.

        The last token is never matched: its hidden state is needed, so it is always computed.
        """
        wanted = np.asarray(tokens[:-1], dtype=np.int32)
        if len(wanted) < _MIN_SHARED_TOKENS:
            return None
        reach = min(len(wanted), self._tokens.shape[1])
        differs = self._tokens[:, :reach] != wanted[:reach]
        common = np.where(differs.any(axis=1), differs.argmax(axis=1), reach)
        shared = np.minimum(common, self._lengths)
        shared[[held != space for held in self._spaces]] = 0
        row = int(shared.argmax())
        if shared[row] < _MIN_SHARED_TOKENS:
            return None
        self._touch(row)
        return PrefixMatch(row, int(shared[row]))

    def least_valuable(self, rows: Sequence[int]) -> int:
        """The row to overwrite: an empty one if there is one, else the one unused for longest; lowest wins
        ties."""
        return min(rows, key=lambda row: (self._last_used[row] if self._lengths[row] else -1, row))

    def _touch(self, row: int) -> None:
        self._tick += 1
        self._last_used[row] = self._tick
