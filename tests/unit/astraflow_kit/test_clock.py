"""Clocks."""

from astraflow_kit.clock import SystemClock


def test_the_system_clock_never_goes_back() -> None:
    clock = SystemClock()
    readings = [clock.monotonic_s() for _ in range(100)]
    assert readings == sorted(readings)
    assert clock.wall_time_s() > 1_700_000_000
