"""Calls go to engines that are ready and serve the policy's version: who asks first is served first, evenly spread."""

import asyncio
import math

import pytest

from astraflow_raas.engine.base import EngineDoubtful, EngineDown
from astraflow_raas.engine.replicas import Places, Replicas
from astraflow_raas.engine.slots import EngineSlots
from support.fake_engine import FakeEngine


def replicas_of(*engines: FakeEngine, patience_s: float = math.inf) -> Replicas:
    """Engines that all serve version 1."""
    replicas = Replicas("solver", number=len(engines), patience_s=patience_s, on_change=lambda: None)
    for replica, engine in zip(replicas.all, engines, strict=True):
        replica.ready(engine, version=1)
    return replicas


def with_places(number: int) -> FakeEngine:
    return FakeEngine(version=1, slots=EngineSlots(number))


async def take(replicas: Replicas, number: int) -> tuple[int, int]:
    """Which engine gave how many places."""
    places = await replicas.take(lambda: number)
    return places.replica.number, places.number


async def test_calls_are_spread_evenly_as_far_as_engines_have_places() -> None:
    replicas = replicas_of(with_places(8), with_places(8), with_places(3))
    given = [await take(replicas, number) for number in (7, 4, 2, 12, 8, 7, 2)]
    assert given == [(1, 3), (2, 2), (3, 2), (2, 4), (3, 1), (1, 5), (2, 2)]


async def test_who_asks_first_is_served_first_by_whichever_is_free_and_who_leaves_blocks_nobody() -> None:
    replicas = replicas_of(with_places(1), with_places(1))
    full = [await replicas.take(lambda: 1) for _ in range(2)]
    served: list[str] = []

    async def ask(name: str) -> None:
        await replicas.take(lambda: 1)
        served.append(name)

    leaver, *others = [asyncio.create_task(ask(name)) for name in ("leaver", "second", "third")]
    await asyncio.sleep(0)
    leaver.cancel()
    for places in reversed(full):
        replicas.give_back(places)
        await asyncio.sleep(0.01)
    await asyncio.gather(*others)
    assert served == ["second", "third"]


async def test_an_engine_that_is_lost_doubted_or_behind_gets_no_call_until_it_is_like_the_others() -> None:
    first, second = FakeEngine(version=1), FakeEngine(version=1)
    replicas = replicas_of(first, second)
    one, other = replicas.all
    one.lost()
    assert await take(replicas, 2) == (2, 2)
    one.ready(first, version=1)
    other.distrust(EngineDoubtful("it may be paused"))
    assert await take(replicas, 2) == (1, 2)
    other.ready(second, version=2)
    assert (replicas.version, replicas.in_service) == (2, [other]), "the first one has not caught up"
    one.serves(2)
    assert replicas.in_service == [one, other]


async def test_calls_wait_for_one_engine_and_not_longer_than_patience_for_any() -> None:
    replicas = replicas_of(with_places(1), with_places(1), patience_s=0.05)
    one, other = replicas.all
    held: list[Places] = [await replicas.take(lambda: 1) for _ in range(2)]
    one.lost()
    waiting = asyncio.create_task(take(replicas, 1))
    await asyncio.sleep(0.1)
    assert not waiting.done(), "an engine is there, only full"
    replicas.give_back(held[1])
    assert await waiting == (2, 1)
    other.lost()
    with pytest.raises(EngineDown, match="'solver' has had no engine here for 0"):
        await take(replicas, 1)
    one.ready(with_places(1), version=1)
    assert await take(replicas, 1) == (1, 1)


async def test_each_engine_is_known_by_its_own_calls_and_answers() -> None:
    replicas = replicas_of(with_places(4), with_places(4))
    one, other = replicas.all
    held = await replicas.take(lambda: 3)
    assert (one.num_calls, other.num_calls) == (2, 0)
    before_s = one.last_answer_s
    await asyncio.sleep(0.01)
    await replicas.take(lambda: 1)
    assert one.last_answer_s == before_s, "what begins in its neighbour is no sign of life"
    assert other.last_answer_s > before_s
    replicas.give_back(held)
    assert (one.num_calls, other.num_calls) == (0, 1)
