"""Barriers and marks follow the beats of a Redis that is played here."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from astraflow.dataflow.v1 import durability_pb2
from astraflow.errors import AstraflowError, IncompatibleError, UnavailableError
from astraflow_dataflow.records import Ability, Beat, Level
from astraflow_dataflow.store.durability import Durability, Method, choose_method, lost_runs
from support.scripted_dataflow import eventually


@dataclass(eq=False)
class PlayedRedis:
    """Answers beats by script: each turn is taken when the test lets it."""

    ability: Ability
    incarnation: str = "a"
    positions: dict[str, int] = field(default_factory=dict)
    safe: list[bool | AstraflowError] = field(default_factory=list)
    num_beats: int = 0
    answered: asyncio.Event = field(default_factory=asyncio.Event)

    async def durability(self) -> Ability:
        """What it can."""
        return self.ability

    async def beat(self, run_ids: Sequence[str], *, wait: Sequence[object]) -> Beat:
        """One beat; safe unless the script says otherwise."""
        self.num_beats += 1
        await asyncio.sleep(0)
        answer = self.safe.pop(0) if self.safe else True
        if isinstance(answer, AstraflowError):
            raise answer
        self.answered.set()
        positions = {run_id: self.positions.get(run_id, 0) for run_id in run_ids}
        return Beat(incarnation=self.incarnation, positions=positions, is_safe=answer)

    async def replace_incarnation(self, seen: str) -> None:
        """Another identity."""
        self.incarnation = seen + "'"

    @property
    def primaries(self) -> tuple[Any, ...]:
        """It is alone."""
        return (self,)

    def home(self, run_id: str) -> Any:
        """It has all runs."""
        return self


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    """What durability asks of a Redis is asked of the script."""
    monkeypatch.setattr("astraflow_dataflow.store.durability.ability_of", PlayedRedis.durability)
    monkeypatch.setattr("astraflow_dataflow.store.durability.beat_of", PlayedRedis.beat)


def able(**changes: Any) -> Any:
    """Answers in place of a connection, as a Redis with everysec and no replica but for the changes."""
    known = Ability(name="Redis 9", append_only=True, appendfsync="everysec", has_waitaof=True, replicas=0)
    return PlayedRedis(replace(known, **changes))


@asynccontextmanager
async def following(redis: Any, level: Level = Level.FSYNCED, **positions: int) -> AsyncIterator[Durability]:
    """A running follower of runs that are at these positions."""
    redis.positions = positions
    durability = Durability(redis, level)
    durability.on_loss = AsyncMock()
    await durability.start()
    running = asyncio.create_task(durability.run())
    try:
        yield durability
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


CHOICES = [
    (able(), Level.MEMORY, Method.WAITAOF),
    (able(has_waitaof=False), Level.MEMORY, Method.NONE),
    (able(has_waitaof=False, appendfsync="always"), Level.FSYNCED, Method.ALWAYS),
    (able(appendfsync="no"), Level.MEMORY, Method.NONE),
    (able(append_only=False), Level.MEMORY, Method.NONE),
    (able(appendfsync="unknown"), Level.FSYNCED, Method.WAITAOF),
    (able(replicas=2), Level.REPLICATED, Method.WAIT),
]


@pytest.mark.parametrize(("redis", "level", "method"), CHOICES)
async def test_the_method_is_what_redis_can(redis: Any, level: Level, method: Method) -> None:
    assert await choose_method(redis, level) is method


REFUSED = [
    (able(has_waitaof=False), Level.FSYNCED, "without WAITAOF.*appendfsync always"),
    (able(appendfsync="no"), Level.FSYNCED, "appendfsync no"),
    (able(append_only=False), Level.FSYNCED, "appendonly no"),
    (able(), Level.REPLICATED, "no connected replica"),
]


@pytest.mark.parametrize(("redis", "level", "sentence"), REFUSED)
async def test_a_level_that_redis_cannot_give_is_refused(redis: Any, level: Level, sentence: str) -> None:
    with pytest.raises(IncompatibleError, match=sentence):
        await choose_method(redis, level)


async def test_acks_wait_until_a_beat_after_them_is_safe() -> None:
    redis = able()
    redis.safe = [False, False, True]
    async with following(redis) as durability:
        await durability.barrier("run")
    assert redis.num_beats == 3


async def test_acks_that_come_together_share_a_beat() -> None:
    redis = able()
    async with following(redis) as durability:
        await asyncio.gather(*(durability.barrier("run") for _ in range(50)))
    assert redis.num_beats <= 2


async def test_an_ack_that_could_not_be_made_safe_is_an_error() -> None:
    redis = able()
    redis.safe = [UnavailableError("away")]
    async with following(redis) as durability:
        with pytest.raises(UnavailableError, match="away"):
            await durability.barrier("run")


async def test_in_memory_nothing_waits() -> None:
    durability = Durability(able(), Level.MEMORY)
    await durability.start()
    await durability.barrier("run")
    assert durability.reached("run") == durability_pb2.DURABILITY_MEMORY


async def test_a_mark_is_told_with_the_identity_of_its_data() -> None:
    async with following(able(), Level.MEMORY, run=7) as durability:
        durability.on_mark = told = Mock()
        assert durability.watermark("run") is None
        durability.note("run", 7)
        await eventually(lambda: told.called, what="the mark")
        mark = durability.watermark("run")
        fsynced = {"durability": durability_pb2.DURABILITY_FSYNCED, "data_incarnation": "a"}
        assert mark == durability_pb2.Watermark(durable_position=7, **fsynced)
        durability.forget("run")
        assert durability.watermark("run") is None


async def test_a_redis_that_cannot_tell_gives_no_mark() -> None:
    redis = able(has_waitaof=False)
    async with following(redis, Level.MEMORY, run=7) as durability:
        durability.note("run", 7)
        await asyncio.wait_for(redis.answered.wait(), 10)
        await asyncio.sleep(0)
        assert durability.watermark("run") is None


async def test_a_position_that_falls_gives_the_data_another_identity() -> None:
    redis = able()
    async with following(redis, run=7) as durability:
        durability.note("run", 7)
        await durability.barrier("run")
        redis.positions["run"] = 3
        durability.note("run", 3)  # nothing else makes it look: no beat is under way
        await eventually(durability.on_loss.mock_calls.copy, what="the loss")  # type: ignore[attr-defined]
        assert redis.incarnation == "a'"


async def test_a_commit_beside_the_very_first_beat_is_remembered() -> None:
    redis = able()
    async with following(redis, run=1) as durability:
        durability.note("run", 1)
        first = asyncio.create_task(durability.barrier("run"))
        await asyncio.wait_for(redis.answered.wait(), 10)
        durability.note("run", 2)
        await first
        redis.positions["run"] = 1
        durability.note("run", 3)
        await eventually(durability.on_loss.mock_calls.copy, what="the loss")  # type: ignore[attr-defined]


async def test_positions_of_another_process_are_not_compared() -> None:
    redis = able()
    async with following(redis, run=7) as durability:
        durability.note("run", 7)
        await durability.barrier("run")
        redis.incarnation, redis.positions["run"] = "b", 3
        await durability.barrier("run")
        assert redis.incarnation == "b"
        mark = durability.watermark("run")
        assert mark is not None
        assert (mark.durable_position, mark.data_incarnation) == (3, "b")


def test_lost_runs_are_those_whose_position_fell() -> None:
    assert lost_runs({"a": 3, "b": 2, "c": 1}, {"a": 3, "b": 1}) == ["b", "c"]
