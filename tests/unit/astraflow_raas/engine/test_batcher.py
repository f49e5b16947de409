"""Calls of one turn and one key share a request; faults and cancellations stay with whom they belong."""

import asyncio
from collections.abc import Sequence

import pytest

from astraflow_raas.engine.base import Engine, EngineRefused, EngineUnavailable, GenerateCall, Generation
from astraflow_raas.engine.batcher import CallBatcher
from astraflow_raas.engine.slots import EngineSlots
from support.fake_engine import FakeEngine
from support.raas_parts import generate_call
from support.scripted_dataflow import eventually


def call(rid: str, **differing: object) -> GenerateCall:
    return generate_call(rid, seed=hash(rid) % 1000, **differing)


def batcher_of(engine: Engine, *, max_requests: int = 4) -> CallBatcher:
    async def ready() -> Engine:
        return engine

    return CallBatcher(ready, max_requests=max_requests)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(version=1)


@pytest.fixture
def batcher(engine: FakeEngine) -> CallBatcher:
    return batcher_of(engine)


def generating(batcher: CallBatcher, *names: str) -> "list[asyncio.Task[Generation]]":
    """Calls of one key that wait for their answers."""
    return [asyncio.create_task(batcher.generate(call(name), key="task")) for name in names]


async def test_calls_made_together_share_one_request_and_each_gets_its_own_answer(
    engine: FakeEngine, batcher: CallBatcher
) -> None:
    answers = await asyncio.gather(*generating(batcher, "r0", "r1", "r2", "r3", "r4"))
    assert [len(request) for request in engine.requests] == [5]
    alone = await engine.generate([call("r3")])
    assert answers[3] == alone[0]


async def test_calls_of_different_keys_are_sent_apart(engine: FakeEngine, batcher: CallBatcher) -> None:
    await asyncio.gather(*(batcher.generate(call(f"r{n}"), key=n % 2) for n in range(4)))
    assert sorted(len(request) for request in engine.requests) == [2, 2]


async def test_a_later_call_does_not_wait_for_a_request_in_flight(
    engine: FakeEngine, batcher: CallBatcher
) -> None:
    engine.may_answer.clear()
    first = generating(batcher, "a")
    await eventually(lambda: len(engine.requests) == 1, what="the first is sent")
    second = generating(batcher, "b")
    await eventually(lambda: len(engine.requests) == 2, what="the second is sent beside it")
    engine.may_answer.set()
    await asyncio.gather(*first, *second)


async def test_calls_beyond_the_requests_in_flight_wait_and_share_the_next_one(engine: FakeEngine) -> None:
    engine.may_answer.clear()
    batcher, calls = batcher_of(engine, max_requests=2), []
    for name in "abcde":
        calls += generating(batcher, name)
        await asyncio.sleep(0.01)
    assert [len(request) for request in engine.requests] == [1, 1]
    engine.may_answer.set()
    await asyncio.gather(*calls)
    assert [len(request) for request in engine.requests] == [1, 1, 3]


async def test_a_cancelled_call_is_aborted_and_its_neighbours_go_on(
    engine: FakeEngine, batcher: CallBatcher
) -> None:
    engine.may_answer.clear()
    doomed, lucky = generating(batcher, "doomed", "lucky")
    await eventually(lambda: engine.requests, what="both are sent")
    doomed.cancel()
    await eventually(lambda: engine.aborted == ["doomed"], what="the cancelled one is aborted")
    engine.may_answer.set()
    assert (await lucky).token_ids


async def test_a_call_cancelled_before_its_turn_is_never_sent(
    engine: FakeEngine, batcher: CallBatcher
) -> None:
    (doomed,) = generating(batcher, "doomed")
    await asyncio.sleep(0)
    doomed.cancel()
    await asyncio.sleep(0.01)
    assert engine.requests == []


async def test_an_engine_that_is_down_fails_every_call_of_the_request(
    engine: FakeEngine, batcher: CallBatcher
) -> None:
    engine.up = False
    answers = await asyncio.gather(*generating(batcher, "a", "b"), return_exceptions=True)
    assert all(isinstance(answer, EngineUnavailable) for answer in answers)
    assert answers[0] is not answers[1]


class _Picky(FakeEngine):
    """Refuses a whole request when one prompt is too long, as the HTTP API does."""

    async def generate(self, calls: Sequence[GenerateCall], *, rank: int = 0) -> list[Generation]:
        if any(len(one.prompt_ids) > 3 for one in calls):
            raise EngineRefused("a prompt is too long")
        return await super().generate(calls, rank=rank)


async def test_a_refused_request_is_split_so_that_only_the_culprit_fails() -> None:
    batcher = batcher_of(_Picky(version=1))
    good, bad = await asyncio.gather(
        batcher.generate(call("good"), key="task"),
        batcher.generate(call("bad", prompt_ids=(1, 2, 3, 4)), key="task"),
        return_exceptions=True,
    )
    assert isinstance(good, Generation)
    assert isinstance(bad, EngineRefused)


async def test_closing_cancels_callers_that_still_wait(engine: FakeEngine, batcher: CallBatcher) -> None:
    engine.may_answer.clear()
    (waiting,) = generating(batcher, "a")
    await eventually(lambda: engine.requests, what="the call is sent")
    await batcher.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_the_engine_never_holds_more_calls_than_it_has_places(
    batcher: CallBatcher, engine: FakeEngine
) -> None:
    engine.slots = EngineSlots(2, num_ranks=2)
    engine.may_answer.clear()
    calls = generating(batcher, *"abcdefg")
    await eventually(lambda: len(engine.requests) == 2, what="both ranks are full")
    calls[4].cancel()
    await asyncio.sleep(0.05)
    assert [len(request) for request in engine.requests] == [2, 2]
    assert engine.ranks == [0, 1]
    engine.may_answer.set()
    await asyncio.gather(*calls, return_exceptions=True)
    assert [[one.rid for one in request] for request in engine.requests[2:]] == [["f", "g"]]


async def test_places_of_failed_calls_are_free_again(batcher: CallBatcher, engine: FakeEngine) -> None:
    engine.slots = EngineSlots(1)
    engine.up = False
    await asyncio.gather(*generating(batcher, "a", "b"), return_exceptions=True)
    engine.up = True
    answers = await asyncio.gather(*generating(batcher, "c", "d"))
    assert all(answer.token_ids for answer in answers)
