"""Clocks."""

from astraflow_kit.clock import ManualClock, SystemClock


def test_the_system_clock_never_goes_back() -> None:
    clock = SystemClock()
    readings = [clock.monotonic_s() for _ in range(100)]
    assert readings == sorted(readings)
    assert clock.wall_time_s() > 1_700_000_000


def test_a_manual_clock_moves_when_told_and_skew_moves_the_wall_only() -> None:
    clock = ManualClock()
    start_s = clock.wall_time_s()
    clock.now_s += 2.5
    clock.skew_s -= 3600
    assert clock.monotonic_s() == 2.5
    assert clock.wall_time_s() == start_s + 2.5 - 3600
