"""A clock that a test moves."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class ManualClock:
    """A clock that moves only when told: add to `now_s`, or to `skew_s` for the wall clock alone."""

    now_s: float = 0.0
    skew_s: float = 1_700_000_000.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_time_s(self) -> float:
        return self.now_s + self.skew_s
