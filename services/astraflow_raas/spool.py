"""Finished episodes that the server may not have safely yet.

Invariant: an episode is in exactly one place: unsent, in flight, or acknowledged but kept a little longer,
because an acknowledgement in memory survives a server restart and not the loss of its disk; order of arrival
is kept, also when a broken stream sends the unacknowledged ones back. Pure apart from the futures that
callers wait on; owned by `push`.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from astraflow.dataflow.v1 import durability_pb2, trajectory_service_pb2
from astraflow.rollout.v1 import trajectory_pb2
from astraflow_kit.clock import Clock


@dataclass(frozen=True, kw_only=True)
class SpoolLimits:
    """Bounds of the spool, and of what may be unacknowledged on the wire (the contract's figures)."""

    max_episodes: int = 4096
    max_bytes: int = 2**28
    window_episodes: int = 64
    window_bytes: int = 16 * 2**20
    retain_acked_s: float = 3.0
    """How long an episode is kept after an acknowledgement in memory; the server's disk follows within one
    second."""


@dataclass(eq=False, kw_only=True, slots=True)
class Spooled:
    """One episode and whoever waits for its outcome."""

    episode: trajectory_pb2.Episode
    size_bytes: int
    outcome: asyncio.Future[trajectory_service_pb2.PushResult]
    acked_s: float = 0.0


@dataclass(kw_only=True)
class Spool:
    """The three places. `num_waiting` and `num_bytes` count episodes without an acknowledgement."""

    limits: SpoolLimits
    clock: Clock
    num_bytes: int = 0
    _unsent: deque[Spooled] = field(default_factory=deque)
    _in_flight: deque[Spooled] = field(default_factory=deque)
    _acked: deque[Spooled] = field(default_factory=deque)
    _flight_bytes: int = 0

    @property
    def num_waiting(self) -> int:
        """Episodes without an acknowledgement."""
        return len(self._unsent) + len(self._in_flight)

    def has_room(self, size_bytes: int) -> bool:
        """Whether one more episode fits; an empty spool takes any."""
        fits = self.num_bytes + size_bytes <= self.limits.max_bytes
        return not self.num_waiting or (fits and self.num_waiting < self.limits.max_episodes)

    def add(self, spooled: Spooled) -> None:
        """Append an unsent episode."""
        self._unsent.append(spooled)
        self.num_bytes += spooled.size_bytes

    def next_to_send(self) -> Spooled | None:
        """Move the oldest unsent episode into flight and return it; None when there is none or the window is
        full."""
        if not self._unsent or not self._window_takes(self._unsent[0].size_bytes):
            return None
        spooled = self._unsent.popleft()
        self._in_flight.append(spooled)
        self._flight_bytes += spooled.size_bytes
        return spooled

    def acknowledge(self, result: trajectory_service_pb2.PushResult) -> Spooled | None:
        """Take the oldest episode in flight out, tell its waiter, and return it; None when none is in
        flight."""
        if not self._in_flight:
            return None
        spooled = self._leave_flight()
        if not spooled.outcome.done():
            spooled.outcome.set_result(result)
        self._retain(spooled, durability=result.durability)
        return spooled

    def stream_broke(self) -> None:
        """Send everything in flight again, in the old order, on the next stream."""
        self._unsent.extendleft(reversed(self._in_flight))
        self._in_flight.clear()
        self._flight_bytes = 0

    def data_was_lost(self) -> int:
        """The server's data set is another one: push what was acknowledged recently again. Returns how
        many."""
        self._forget_old()
        again = list(self._acked)
        self._acked.clear()
        self._unsent.extendleft(reversed(again))
        self.num_bytes += sum(spooled.size_bytes for spooled in again)
        return len(again)

    def _window_takes(self, size_bytes: int) -> bool:
        fits = self._flight_bytes + size_bytes <= self.limits.window_bytes
        return not self._in_flight or (fits and len(self._in_flight) < self.limits.window_episodes)

    def _leave_flight(self) -> Spooled:
        spooled = self._in_flight.popleft()
        self._flight_bytes -= spooled.size_bytes
        self.num_bytes -= spooled.size_bytes
        return spooled

    def _retain(self, spooled: Spooled, *, durability: int) -> None:
        self._forget_old()
        if durability < durability_pb2.DURABILITY_FSYNCED:
            spooled.acked_s = self.clock.monotonic_s()
            self._acked.append(spooled)

    def _forget_old(self) -> None:
        horizon_s = self.clock.monotonic_s() - self.limits.retain_acked_s
        while self._acked and (
            self._acked[0].acked_s < horizon_s or len(self._acked) > self.limits.max_episodes
        ):
            self._acked.popleft()
