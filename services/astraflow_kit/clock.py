"""Time as a value that is passed in.

Invariant: durations and deadlines come from `monotonic_s`, which never jumps; `wall_time_s` is only for
stamps that people read. Domain modules receive a Clock; daemons pass `SystemClock`.
"""

import time
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
