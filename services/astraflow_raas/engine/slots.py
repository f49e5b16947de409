"""Places in an engine: one for each sequence that it samples at once.

Invariant: no more calls are in the engine than it runs: one that waited inside it over a change of weights would begin
with prefixes of the older ones. Whoever asks first is served first. Every engine has its own; taken by `batcher`.
"""

import asyncio
from collections.abc import Callable


class EngineSlots:
    """Free places of each data-parallel rank. Owned by one event loop."""

    def __init__(self, per_rank: int, *, num_ranks: int = 1) -> None:
        self.total = per_rank * num_ranks
        """Places of all ranks, taken ones included."""
        self._free = [per_rank] * num_ranks
        self._turn = asyncio.Lock()
        self._returned = asyncio.Event()

    async def take(self, wanted: Callable[[], int]) -> tuple[int, int]:
        """Wait for a free place, then take as many as `wanted` says then, in the rank that has most free.

        Returns the rank and how many: at most what is wanted, 0 when nothing is any more.
        """
        async with self._turn:
            while not (free := max(self._free)):
                self._returned.clear()
                await self._returned.wait()
            rank = self._free.index(free)
            taken = min(free, wanted())
            self._free[rank] -= taken
        return rank, taken

    def give_back(self, rank: int, taken: int) -> None:
        """The calls in these places were answered, or will never be."""
        self._free[rank] += taken
        self._returned.set()
