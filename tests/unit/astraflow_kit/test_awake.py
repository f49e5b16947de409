"""Patience counts only time in which the process ran: sleep of the machine is nobody's silence."""

import asyncio

import pytest

from astraflow_kit.awake import Silence, within
from support.manual_clock import ManualClock


def test_silence_lasts_from_the_last_progress_on() -> None:
    clock = ManualClock()
    silence = Silence(period_s=1.0, clock=clock)
    assert silence.look(7) == 0.0
    clock.now_s += 1.0
    assert silence.look(7) == 1.0
    clock.now_s += 1.5
    assert silence.look(7) == 2.5
    clock.now_s += 1.0
    assert silence.look(8) == 0.0
    clock.now_s += 1.0
    assert silence.look(8) == 1.0


def test_a_look_after_a_night_asleep_counts_for_two_periods() -> None:
    clock = ManualClock()
    silence = Silence(period_s=1.0, clock=clock)
    silence.look(None)
    clock.now_s += 8 * 3600.0
    assert silence.look(None) == 2.0


@pytest.mark.parametrize("jump_s", [-3 * 3600.0, 3 * 3600.0])
def test_jumps_of_the_wall_clock_count_for_nothing(jump_s: float) -> None:
    clock = ManualClock()
    silence = Silence(clock=clock)
    silence.look(None)
    clock.skew_s += jump_s
    assert silence.look(None) == 0.0


async def test_work_within_its_time_returns_or_raises_what_it_does() -> None:
    async def answer() -> int:
        await asyncio.sleep(0)
        return 4

    async def fail() -> int:
        raise ValueError("as asked")

    assert await within(answer(), 5.0) == 4
    with pytest.raises(ValueError, match="as asked"):
        await within(fail(), 5.0)


async def test_work_that_takes_longer_is_over_when_the_timeout_is_raised() -> None:
    ended = asyncio.Event()

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(TimeoutError):
        await within(hang(), 0.05)
    assert ended.is_set()


async def test_who_slept_in_the_middle_still_takes_the_answer() -> None:
    clock = ManualClock()

    async def answer_after_the_night() -> str:
        await asyncio.sleep(0)
        clock.now_s += 8 * 3600.0
        await asyncio.sleep(0)
        return "awake again"

    assert await within(answer_after_the_night(), 30.0, clock=clock) == "awake again"
