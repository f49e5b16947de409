"""Time as a value that is passed in.

Invariant: durations and deadlines come from `monotonic_s`, which never jumps; `wall_time_s` is only for
stamps that people read. Domain modules receive a Clock; daemons pass `SystemClock`.
"""

import time
from typing import Protocol

from astraflow.errors import InvalidArgumentError

_DAY_NS = 86_400 * 10**9


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


def require_incarnation(incarnation: int) -> None:
    """Raise InvalidArgumentError for one beyond the time in nanoseconds and a day, which would fence its holder."""
    if incarnation > (most := time.time_ns() + _DAY_NS):
        raise InvalidArgumentError(
            f"incarnation {incarnation} is beyond this server's clock, at most {most}; count starts, or give the time, "
            "and set the clock of that machine"
        )
