"""The scheduler thread: every future is answered, also when the thread stops or fails."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import pytest

from astraflow_engine.core import EngineCore
from astraflow_engine.errors import EngineUnavailable, InvalidRequest, QueueFull
from astraflow_engine.requests import FinishKind, PauseMode
from astraflow_engine.worker import EngineWorker
from astraflow_kit import failpoints
from support import engine_parts
from support.engine_parts import DEADLINE_S, greedy

T = TypeVar("T")


@pytest.fixture
def make_worker(folder: Path) -> Iterator[Callable[..., EngineWorker]]:
    """Makes workers that are stopped at the end; a test starts them itself."""
    made: list[EngineWorker] = []

    def make(**options: int) -> EngineWorker:
        made.append(engine_parts.make_worker(folder, **options))
        return made[-1]

    yield make
    assert all(worker.stop(deadline_s=DEADLINE_S) for worker in made)


@pytest.fixture
def paused(worker: EngineWorker) -> EngineWorker:
    """A worker that holds what is sent to it."""
    answer(worker.pause(PauseMode.IN_PLACE))
    return worker


@pytest.fixture
def worker(make_worker: Callable[..., EngineWorker]) -> EngineWorker:
    worker = make_worker()
    worker.start()
    return worker


def answer(future: "Future[T]") -> T:
    return future.result(DEADLINE_S)


def test_a_refused_request_does_not_disturb_the_others(paused: EngineWorker) -> None:
    first, second = paused.submit(greedy("same")), paused.submit(greedy("same"))
    with pytest.raises(InvalidRequest, match="already in progress"):
        answer(second)
    answer(paused.call(EngineCore.resume))
    assert len(answer(first).tokens) == 6


def test_a_command_s_error_belongs_to_its_sender(worker: EngineWorker) -> None:
    def broken(core: EngineCore) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        answer(worker.call(broken))
    assert len(answer(worker.submit(greedy("after"))).tokens) == 6


def test_commands_take_effect_in_order(worker: EngineWorker) -> None:
    paused = worker.pause(PauseMode.IN_PLACE)
    request = worker.submit(greedy("held"))
    live = worker.call(lambda core: core.num_live)
    assert (answer(paused), answer(live), request.done()) == (0, 1, False)


def test_aborting_answers_the_request_and_counts_it(paused: EngineWorker) -> None:
    request = paused.submit(greedy("r"))
    assert answer(paused.abort(lambda known: known.rid == "r")) == 1
    assert answer(request).finish.kind is FinishKind.ABORT


def test_an_answer_nobody_waits_for_is_dropped(paused: EngineWorker) -> None:
    unwanted = paused.submit(greedy("unwanted"))
    answer(paused.call(lambda core: core.num_live))
    assert unwanted.cancel()
    answer(paused.call(EngineCore.resume))
    assert len(answer(paused.submit(greedy("wanted"))).tokens) == 6


def test_a_failing_pass_fails_all_and_ends_the_thread(make_worker: Callable[..., EngineWorker]) -> None:
    worker = make_worker()
    failpoints.arm("engine.decode_step=raise@2")
    requests = [worker.submit(greedy(str(index))) for index in range(6)]
    worker.start()
    for request in requests:
        with pytest.raises(EngineUnavailable, match="the engine has stopped"):
            answer(request)
    with pytest.raises(failpoints.FailpointRaised):
        answer(worker.end)
    with pytest.raises(EngineUnavailable):
        answer(worker.submit(greedy("later")))


def test_stopping_refuses_what_is_in_progress_and_what_comes_later(paused: EngineWorker) -> None:
    held = paused.submit(greedy("held"))
    assert paused.stop(deadline_s=DEADLINE_S)
    assert answer(paused.end) is None
    for future in (held, paused.submit(greedy("later")), paused.call(EngineCore.stats)):
        with pytest.raises(EngineUnavailable):
            future.result(DEADLINE_S)


def test_more_than_the_queue_holds_is_refused_at_once(make_worker: Callable[..., EngineWorker]) -> None:
    worker = make_worker(max_in_flight=3)
    futures = [worker.submit(greedy(str(index))) for index in range(5)]
    for future in futures[3:]:
        with pytest.raises(QueueFull, match="3 requests are not yet taken in"):
            answer(future)
    worker.start()
    assert [len(answer(future).tokens) for future in futures[:3]] == [6, 6, 6]
