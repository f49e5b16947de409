"""Finished episodes that the server may not have safely yet.

Invariant: an episode is in exactly one place: unsent, in flight, or acknowledged but kept a little longer,
because an acknowledgement in memory survives a server restart and not the loss of its disk; all three together
are bounded; order of arrival is kept, also when a broken stream sends the unacknowledged ones back. Pure apart
from the futures that callers wait on; owned by `pushing`, which keeps the same episodes on disk (`spool_files`).
"""

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from astraflow.dataflow.v1 import durability_pb2, trajectory_service_pb2
from astraflow.rollout.v1 import trajectory_pb2
from astraflow_kit.clock import Clock


@dataclass(frozen=True, kw_only=True)
class SpoolLimits:
    """Bounds of the spool, and of what may be unacknowledged on the wire (the contract's figures)."""

    max_episodes: int = 4096
    max_bytes: int = 2**28
    window_episodes: int = 128
    window_bytes: int = 16 * 2**20
    retain_acked_s: float = 3.0
    """How long an episode is kept after an acknowledgement in memory when the server cannot tell what is durable;
    its disk follows within one second."""


@dataclass(eq=False, kw_only=True, slots=True)
class Spooled:
    """One episode and whoever waits for its outcome."""

    episode: trajectory_pb2.Episode
    size_bytes: int
    outcome: asyncio.Future[trajectory_service_pb2.PushResult]
    sequence: int = 0
    """The push of the stream of now that it went with."""
    file: int | None = None
    """Its file on disk; None when it could not be written."""
    acked_s: float = 0.0
    repeated: bool = False
    """Whether an earlier push of it is in doubt: nothing new is begun before it is answered."""
    position: int = 0
    """Where its commit is in the run's order; 0 when the server did not say."""


@dataclass(kw_only=True)
class Spool:
    """The three places. `released` is called with each episode that nobody can need any more."""

    limits: SpoolLimits
    clock: Clock
    released: Callable[[Spooled], None] = lambda _spooled: None
    num_bytes: int = 0
    """Bytes of all episodes in the spool."""
    num_repeated: int = 0
    """Repeated episodes without an answer."""
    _unsent: deque[Spooled] = field(default_factory=deque)
    _in_flight: deque[Spooled] = field(default_factory=deque)
    _acked: deque[Spooled] = field(default_factory=deque)
    _flight_bytes: int = 0
    _durable_position: int | None = None

    @property
    def num_waiting(self) -> int:
        """Episodes without an acknowledgement."""
        return len(self._unsent) + len(self._in_flight)

    @property
    def num_kept(self) -> int:
        """All episodes in the spool, those included that are acknowledged and not yet safe."""
        return self.num_waiting + len(self._acked)

    def has_room(self, size_bytes: int) -> bool:
        """Whether one more episode fits; an empty spool takes any."""
        self.forget_safe()
        fits = self.num_bytes + size_bytes <= self.limits.max_bytes
        return not self.num_kept or (fits and self.num_kept < self.limits.max_episodes)

    def add(self, spooled: Spooled) -> None:
        """Append an unsent episode."""
        self._unsent.append(spooled)
        self.num_repeated += spooled.repeated
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

    def num_in_flight(self, sequence: int) -> int:
        """Episodes without an answer that went with this push or one before; 0 where none went with this one."""
        sequences = [spooled.sequence for spooled in self._in_flight]
        return bisect_right(sequences, sequence) if sequence in sequences else 0

    def acknowledge(self, result: trajectory_service_pb2.PushResult) -> Spooled:
        """Take the oldest episode in flight out, tell its waiter, and return it."""
        spooled = self._leave_flight()
        self.num_repeated -= spooled.repeated
        spooled.repeated = False
        if not spooled.outcome.done():
            spooled.outcome.set_result(result)
        self._retain(spooled, result)
        return spooled

    def stream_broke(self) -> None:
        """Send everything in flight again, in the old order, on the next stream."""
        self._unsent.extendleft(reversed(self._in_flight))
        self._in_flight.clear()
        self._flight_bytes = 0

    def data_was_lost(self) -> int:
        """The server's data set is another one: push what was acknowledged recently again. Returns how
        many."""
        self.forget_safe()
        again = list(self._acked)
        self._acked.clear()
        # Positions of the lost data set mean nothing in the new one.
        self._durable_position = None
        for spooled in again:
            spooled.repeated = True
        self.num_repeated += len(again)
        self._unsent.extendleft(reversed(again))
        return len(again)

    def durable(self, position: int) -> None:
        """The server's disk has every commit up to `position`."""
        self._durable_position = position
        self.forget_safe()

    def forget_safe(self) -> None:
        """Let go of the acknowledged episodes that the server's disk has by now."""
        while self._acked and self._is_safe(self._acked[0]):
            self._release(self._acked.popleft())

    def _is_safe(self, acked: Spooled) -> bool:
        if self._durable_position is not None and acked.position:
            return acked.position <= self._durable_position
        return acked.acked_s < self.clock.monotonic_s() - self.limits.retain_acked_s

    def _window_takes(self, size_bytes: int) -> bool:
        fits = self._flight_bytes + size_bytes <= self.limits.window_bytes
        return not self._in_flight or (fits and len(self._in_flight) < self.limits.window_episodes)

    def _leave_flight(self) -> Spooled:
        spooled = self._in_flight.popleft()
        self._flight_bytes -= spooled.size_bytes
        return spooled

    def _retain(self, spooled: Spooled, result: trajectory_service_pb2.PushResult) -> None:
        is_refused = result.outcome == trajectory_service_pb2.OUTCOME_REFUSED
        if is_refused or result.durability >= durability_pb2.DURABILITY_FSYNCED:
            self._release(spooled)
            return
        spooled.acked_s, spooled.position = self.clock.monotonic_s(), result.position
        self._acked.append(spooled)
        self.forget_safe()

    def _release(self, spooled: Spooled) -> None:
        self.num_bytes -= spooled.size_bytes
        self.released(spooled)
