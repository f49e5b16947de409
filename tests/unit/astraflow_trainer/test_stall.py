"""A training thread that stands still is noticed by what it gets done, while it computes and only then."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from astraflow.errors import UnavailableError
from astraflow_kit.lifecycle import ExitCode, exit_code_of
from astraflow_trainer.progress import Progress
from astraflow_trainer.stall import stalled
from support.manual_clock import ManualClock


class Enough(Exception):
    """It was looked at often enough."""


class Looks(ManualClock):
    """A clock on which a second passes between two looks; `at` is called with the number of each."""

    def __init__(self, at: Callable[[int], None]) -> None:
        super().__init__()
        self.num = 0
        self._at = at

    def monotonic_s(self) -> float:
        self.num += 1
        self._at(self.num)
        self.now_s += 1.0
        return super().monotonic_s()


def never_more_than(most: int) -> Callable[[int], None]:
    def at(number: int) -> None:
        if number > most:
            raise Enough

    return at


@contextmanager
def computing(progress: Progress) -> Iterator[None]:
    """A training thread that computes and gets nothing done."""
    begun, go_on = threading.Event(), threading.Event()

    def compute() -> None:
        with progress.computing():
            begun.set()
            go_on.wait()

    thread = threading.Thread(target=compute)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        go_on.set()
        thread.join()


@pytest.fixture
def progress() -> Progress:
    return Progress()


async def test_one_that_hangs_ends_the_trainer_so_that_it_is_started_again(progress: Progress) -> None:
    said: dict[int, str] = {}
    looks = Looks(lambda number: said.update({number: progress.state.hung}))
    with computing(progress):
        error = await stalled(progress, after_s=10, clock=looks, look_s=0)
    assert isinstance(error, UnavailableError)
    assert exit_code_of(error) == ExitCode.UNAVAILABLE
    assert looks.num == 11  # the first look begins to count
    assert next(number for number, hung in said.items() if hung) == 7
    assert "for 10 s, the bound is 10; it is in wait (threading.py:" in error.message
    assert "ASTRAFLOW_TRAINING_STALL_S" in error.message


async def test_each_micro_batch_starts_the_patience_anew_and_ends_what_is_shown(progress: Progress) -> None:
    said: list[str] = []

    def at(number: int) -> None:
        said.append(progress.state.hung)
        if number % 8 == 0 and number < 80:
            progress.moved()

    looks = Looks(at)
    with computing(progress):
        await stalled(progress, after_s=10, clock=looks, look_s=0)
    assert looks.num > 80
    assert said[6]
    assert not said[9]


async def test_who_computes_nothing_and_waits_for_a_server_is_not_hung(progress: Progress) -> None:
    progress.training()
    with pytest.raises(Enough):
        await stalled(progress, after_s=10, clock=Looks(never_more_than(50)), look_s=0)
    assert not progress.state.hung


async def test_a_bound_of_zero_is_none(progress: Progress) -> None:
    with computing(progress), pytest.raises(Enough):
        await stalled(progress, after_s=0, clock=Looks(never_more_than(50)), look_s=0)
    assert not progress.state.hung
