"""Calls of one turn and one key share a request; faults and cancellations stay with whom they belong."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from astraflow_raas.engine.base import EngineRefused, EngineUnavailable, GenerateCall, Generation
from astraflow_raas.engine.batcher import CallBatcher
from astraflow_raas.engine.replicas import Replicas
from astraflow_raas.engine.slots import EngineSlots
from support.fake_engine import FakeEngine
from support.raas_parts import generate_call
from support.scripted_dataflow import eventually


def call(rid: str, **differing: object) -> GenerateCall:
    return generate_call(rid, seed=hash(rid) % 1000, **differing)


@dataclass
class Setup:
    """A batcher over an engine that is ready."""

    engine: FakeEngine = field(default_factory=lambda: FakeEngine(version=1))
    max_requests: int = 4

    def __post_init__(self) -> None:
        replicas = Replicas("solver", number=1, patience_s=math.inf, on_change=lambda: None)
        replicas.all[0].ready(self.engine, version=1)
        self.batcher = CallBatcher(replicas, max_requests=self.max_requests)

    @property
    def sizes(self) -> list[int]:
        """How many calls each request held."""
        return [len(request) for request in self.engine.requests]

    def generating(self, *names: str) -> "list[asyncio.Task[Generation]]":
        """Calls of one key that wait for their answers."""
        return [asyncio.create_task(self.batcher.generate(call(name), key="task")) for name in names]

    async def stalled(self, *names: str) -> "list[asyncio.Task[Generation]]":
        """The same, once a request more is sent that the engine does not answer."""
        self.engine.may_answer.clear()
        calls, count = self.generating(*names), len(self.sizes) + 1
        await eventually(lambda: len(self.sizes) == count, what=f"request {count} is sent")
        return calls


@pytest.fixture
async def setup() -> Setup:
    return Setup()


async def test_calls_made_together_share_one_request_and_each_gets_its_own_answer(setup: Setup) -> None:
    answers = await asyncio.gather(*setup.generating("r0", "r1", "r2", "r3", "r4"))
    assert setup.sizes == [5]
    assert [answers[3]] == await setup.engine.generate([call("r3")])


async def test_calls_of_different_keys_are_sent_apart(setup: Setup) -> None:
    await asyncio.gather(*(setup.batcher.generate(call(f"r{n}"), key=n % 2) for n in range(4)))
    assert setup.sizes == [2, 2]


async def test_a_later_call_does_not_wait_for_a_request_in_flight(setup: Setup) -> None:
    calls = await setup.stalled("a") + await setup.stalled("b")
    setup.engine.may_answer.set()
    await asyncio.gather(*calls)


async def test_calls_beyond_the_requests_in_flight_wait_and_share_the_next_one() -> None:
    setup = Setup(max_requests=2)
    calls = await setup.stalled("a") + await setup.stalled("b")
    calls += setup.generating("c", "d", "e")
    await asyncio.sleep(0.01)
    assert setup.sizes == [1, 1]
    setup.engine.may_answer.set()
    await asyncio.gather(*calls)
    assert setup.sizes == [1, 1, 3]


async def test_calls_long_enough_for_a_request_do_not_wait_for_those_in_flight() -> None:
    setup = Setup(max_requests=1)
    calls = await setup.stalled("a")
    for number in range(4):
        assert setup.sizes == [1]
        long = call(f"long-{number}", max_new_tokens=128)
        calls.append(asyncio.create_task(setup.batcher.generate(long, key="task")))
        await asyncio.sleep(0.01)
    assert setup.sizes == [1, 4]
    setup.engine.may_answer.set()
    await asyncio.gather(*calls)


async def test_a_cancelled_call_is_aborted_and_its_neighbours_go_on(setup: Setup) -> None:
    doomed, lucky = await setup.stalled("doomed", "lucky")
    doomed.cancel()
    await eventually(lambda: setup.engine.aborted == ["doomed"], what="the cancelled one is aborted")
    setup.engine.may_answer.set()
    assert (await lucky).token_ids


async def test_a_call_cancelled_before_its_turn_is_never_sent(setup: Setup) -> None:
    (doomed,) = setup.generating("doomed")
    await asyncio.sleep(0)
    doomed.cancel()
    await asyncio.sleep(0.01)
    assert setup.sizes == []


async def test_an_engine_that_is_down_fails_every_call_of_the_request(setup: Setup) -> None:
    setup.engine.up = False
    answers = await asyncio.gather(*setup.generating("a", "b"), return_exceptions=True)
    assert all(isinstance(answer, EngineUnavailable) for answer in answers)
    assert answers[0] is not answers[1]


class _Picky(FakeEngine):
    """Refuses a whole request when one prompt is too long, as the HTTP API does."""

    async def generate(self, calls: Sequence[GenerateCall], *, rank: int = 0) -> list[Generation]:
        if any(len(one.prompt_ids) > 3 for one in calls):
            raise EngineRefused("a prompt is too long")
        return await super().generate(calls, rank=rank)


async def test_a_refused_request_is_split_so_that_only_the_culprit_fails() -> None:
    batcher, calls = Setup(_Picky(version=1)).batcher, [call("good"), call("bad", prompt_ids=(1, 2, 3, 4))]
    answers = (batcher.generate(one, key="task") for one in calls)
    good, bad = await asyncio.gather(*answers, return_exceptions=True)
    assert isinstance(good, Generation)
    assert isinstance(bad, EngineRefused)


async def test_closing_cancels_callers_that_still_wait(setup: Setup) -> None:
    (waiting,) = await setup.stalled("a")
    await setup.batcher.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_the_engine_never_holds_more_calls_than_it_has_places(setup: Setup) -> None:
    setup.engine.slots = EngineSlots(2, num_ranks=2)
    setup.engine.may_answer.clear()
    calls = setup.generating(*"abcdefg")
    await eventually(lambda: setup.sizes == [2, 2], what="both ranks are full")
    calls[4].cancel()
    await asyncio.sleep(0.05)
    assert (setup.sizes, setup.engine.ranks) == ([2, 2], [0, 1])
    setup.engine.may_answer.set()
    await asyncio.gather(*calls, return_exceptions=True)
    assert [[one.rid for one in request] for request in setup.engine.requests[2:]] == [["f", "g"]]


async def test_places_of_failed_calls_are_free_again(setup: Setup) -> None:
    setup.engine.slots = EngineSlots(1)
    setup.engine.up = False
    await asyncio.gather(*setup.generating("a", "b"), return_exceptions=True)
    setup.engine.up = True
    answers = await asyncio.gather(*setup.generating("c", "d"))
    assert all(answer.token_ids for answer in answers)
