"""What pulling costs here: throughput and latency of the store, and the time to decode, as this process measured them.

Invariant: until enough was measured the figures are priors under which the path with the fewest bytes is cheapest; what
is too small to tell a rate from the overhead around it is not counted. The mirror records and hands `costs()` to the
planner.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from astraflow_weights.codec.tiles.grid import PartKind

# Of less than this the rate is mostly overhead.
_TELLING_BYTES = 4 * 2**20
# An answer of at most this size is latency and nothing else.
_SMALL_BYTES = 64 * 2**10
_WEIGHT = 0.3


@dataclass(frozen=True, kw_only=True)
class PullCosts:
    """Seconds that a pull is expected to take. The defaults are the priors."""

    fetch_s_per_byte: float = 1e-8
    latency_s: float = 0.02
    snapshot_s_per_byte: float = 2e-9
    delta_s_per_byte: float = 2e-9
    parallel: int = 8
    """Objects that are fetched at a time."""

    def bytes_s(self, size_bytes: int, kind: PartKind) -> float:
        """To fetch and decode so many bytes of parts."""
        decode = self.snapshot_s_per_byte if kind is PartKind.SNAPSHOT else self.delta_s_per_byte
        return size_bytes * (self.fetch_s_per_byte + decode)

    def requests_s(self, objects: int) -> float:
        """To wait for the answers to so many requests, `parallel` at a time."""
        return -(-objects // self.parallel) * self.latency_s


class MeasuredRates:
    """Moving averages. Thread-safe."""

    def __init__(self, *, parallel: int) -> None:
        self._lock = threading.Lock()
        self._costs = PullCosts(parallel=parallel)
        self._seen: set[str] = set()

    def costs(self) -> PullCosts:
        """The figures now."""
        return self._costs

    def fetched(self, *, size_bytes: int, took_s: float) -> None:
        """Many objects came side by side."""
        if size_bytes >= _TELLING_BYTES:
            self._learn("fetch_s_per_byte", took_s / size_bytes)

    def answered(self, *, size_bytes: int, took_s: float) -> None:
        """One object came."""
        if size_bytes <= _SMALL_BYTES:
            self._learn("latency_s", took_s)

    def decoded(self, kind: PartKind, *, size_bytes: int, took_s: float) -> None:
        """Parts of one kind were decoded, and applied."""
        if size_bytes >= _TELLING_BYTES:
            name = "snapshot_s_per_byte" if kind is PartKind.SNAPSHOT else "delta_s_per_byte"
            self._learn(name, took_s / size_bytes)

    def _learn(self, name: str, value: float) -> None:
        with self._lock:
            before = getattr(self._costs, name)
            # The first measurement replaces the prior.
            share = _WEIGHT if name in self._seen else 1.0
            self._seen.add(name)
            self._costs = replace(self._costs, **{name: before + share * (value - before)})


@contextmanager
def stopwatch() -> Iterator["Elapsed"]:
    """Measures the block."""
    elapsed, started_s = Elapsed(), time.monotonic()
    try:
        yield elapsed
    finally:
        elapsed.seconds = time.monotonic() - started_s


@dataclass
class Elapsed:
    """How long a block took, once it has ended."""

    seconds: float = 0.0
