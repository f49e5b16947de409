"""Places in an engine: one for each sequence that it samples at once.

Invariant: no more calls are in the engine than it runs: one that waited inside it over a change of weights would begin
with prefixes of the older ones. Every engine has its own; taken by `replicas`.
"""

from collections.abc import Callable


class EngineSlots:
    """Free places of each data-parallel rank. Owned by one event loop."""

    def __init__(self, per_rank: int, *, num_ranks: int = 1) -> None:
        self.total = per_rank * num_ranks
        """Places of all ranks, taken ones included."""
        self._free = [per_rank] * num_ranks
        self.freed: set[Callable[[], None]] = set()
        """Called when places were given back: several policies may wait for those of one engine."""

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks, each with weights of its own."""
        return len(self._free)

    @property
    def num_free(self) -> int:
        """Free places of the rank that has most."""
        return max(self._free)

    def take(self, wanted: int) -> tuple[int, int]:
        """Take up to `wanted` places in the rank that has most free. Returns the rank and how many; they may be 0."""
        rank = self._free.index(self.num_free)
        taken = min(self._free[rank], wanted)
        self._free[rank] -= taken
        return rank, taken

    def give_back(self, rank: int, taken: int) -> None:
        """The calls in these places were answered, or will never be."""
        self._free[rank] += taken
        for call in self.freed:
            call()
