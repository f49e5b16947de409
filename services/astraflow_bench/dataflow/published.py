"""The buffer of the published system, stated again from its algorithm: a heap by version, whose batches are padded.

Measured of it (commit 343e808): a batch pops its samples one by one and sleeps 50 ms after every eight of them, so no
machine serves more than 160 a second. Invariant: nothing but that algorithm; no transport, no server. The measurement
of batches compares with it.
"""

from __future__ import annotations

import heapq
import time
from itertools import count

import numpy as np
from numpy.typing import NDArray  # noqa: TC002 - fields are documented by it

_SLEEP_AFTER, _SLEEP_S = 8, 0.05


class PublishedBuffer:
    """Samples of int32[T] tokens and float32[T] log-probs."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, NDArray[np.int32], NDArray[np.float32]]] = []
        self._arrivals = count()

    def add(self, tokens: NDArray[np.int32], logprobs: NDArray[np.float32], *, version: int) -> None:
        """Keep a sample."""
        heapq.heappush(self._heap, (version, next(self._arrivals), tokens, logprobs))

    def batch(self, size: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The `size` oldest samples, padded to int32[size, T] and float32[size, T]."""
        taken = []
        for number in range(1, size + 1):
            taken.append(heapq.heappop(self._heap))
            if number % _SLEEP_AFTER == 0:
                time.sleep(_SLEEP_S)
        longest = max(len(tokens) for _, _, tokens, _ in taken)
        tokens_BT = np.zeros((size, longest), np.int32)
        logprobs_BT = np.zeros((size, longest), np.float32)
        for row, (_, _, tokens, logprobs) in enumerate(taken):
            tokens_BT[row, : len(tokens)], logprobs_BT[row, : len(logprobs)] = tokens, logprobs
        return tokens_BT, logprobs_BT
