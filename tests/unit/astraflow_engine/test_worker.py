"""The scheduler thread: every future is answered, also when the thread stops or fails."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import pytest

from astraflow_engine.core import EngineCore
from astraflow_engine.errors import EngineUnavailable, InvalidRequest, QueueFull
from astraflow_engine.requests import FinishKind, PauseMode
from astraflow_engine.worker import EngineWorker
from astraflow_kit import failpoints
from support.engine_parts import DEADLINE_S, greedy, make_worker

T = TypeVar("T")


@pytest.fixture
def idle(folder: Path) -> Iterator[EngineWorker]:
    """A worker that the test starts itself."""
    worker = make_worker(folder, max_in_flight=6)
    yield worker
    assert worker.stop(deadline_s=DEADLINE_S)


@pytest.fixture
def worker(idle: EngineWorker) -> EngineWorker:
    idle.start()
    return idle


@pytest.fixture
def paused(worker: EngineWorker) -> EngineWorker:
    """A worker that holds what is sent to it."""
    answer(worker.pause(PauseMode.IN_PLACE))
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


def test_a_failing_pass_fails_every_caller_and_ends_the_thread(idle: EngineWorker) -> None:
    failpoints.arm("engine.decode_step=raise@2")
    requests = [idle.submit(greedy(str(index))) for index in range(6)]
    idle.start()
    for request in requests:
        with pytest.raises(EngineUnavailable, match="the engine has stopped"):
            answer(request)
    with pytest.raises(failpoints.FailpointRaised):
        answer(idle.end)
    with pytest.raises(EngineUnavailable):
        answer(idle.submit(greedy("later")))


def test_stopping_refuses_what_is_in_progress_and_what_comes_later(paused: EngineWorker) -> None:
    held = paused.submit(greedy("held"))
    assert paused.stop(deadline_s=DEADLINE_S)
    assert answer(paused.end) is None
    for future in (held, paused.submit(greedy("later")), paused.call(EngineCore.stats)):
        with pytest.raises(EngineUnavailable):
            future.result(DEADLINE_S)


def test_more_than_the_queue_holds_is_refused_at_once(idle: EngineWorker) -> None:
    futures = [idle.submit(greedy(str(index))) for index in range(8)]
    for future in futures[6:]:
        with pytest.raises(QueueFull, match="6 requests are not yet taken in"):
            answer(future)
    idle.start()
    assert [len(answer(future).tokens) for future in futures[:6]] == [6] * 6
