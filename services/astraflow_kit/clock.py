"""Time as a value that is passed in.

Invariant: durations and deadlines come from `monotonic_s`, which never jumps; `wall_time_s` is only for
stamps that people read. Domain modules receive a Clock; daemons pass `SystemClock`, tests pass
`ManualClock`.
"""

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """What domain code may ask about time."""

    def monotonic_s(self) -> float:
        """Seconds on a clock that never goes back; its zero means nothing."""

    def wall_time_s(self) -> float:
        """Seconds since the Unix epoch; may jump."""


class SystemClock:
    """The machine's own clocks."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_time_s(self) -> float:
        return time.time()


@dataclass(kw_only=True)
class ManualClock:
    """A clock that moves only when told: add to `now_s`, or to `skew_s` for the wall clock alone."""

    now_s: float = 0.0
    skew_s: float = 1_700_000_000.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_time_s(self) -> float:
        return self.now_s + self.skew_s
