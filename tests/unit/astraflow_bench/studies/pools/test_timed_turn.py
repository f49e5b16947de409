"""An answer takes the time of its version on this node and holds a slot for it; an evaluation takes none."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from astraflow.plugins import GenerateResult, Message, Policy, Score, Scorer, TaskSpec, VersionSpan
from astraflow_bench.studies.pools import timed_turn
from astraflow_bench.studies.pools.timed_turn import TimedTurn, length_at, set_speed

TASK = TaskSpec(task_id="train-0", messages=(Message("user", "1 + 1?"),))
LENGTHS = ((0, 1.0), (25, 2.0), (50, 0.5))


class Answering:
    """A policy of a version."""

    max_new_tokens, wants_trajectory, name, role = 8, True, "solver", "solver"

    def __init__(self, version: int, *, is_evaluation: bool = False) -> None:
        self.version, self.is_evaluation = version, is_evaluation

    def encode(self, messages: Sequence[Message] | str, *, tools: object = ()) -> list[int]:
        return [1]

    async def generate(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int | None = None
    ) -> GenerateResult:
        return GenerateResult((7,), (-0.5,), (VersionSpan(0, 1, self.version),), "2", "stop")


class Graded:
    """Every answer is right."""

    async def __call__(self, task: TaskSpec, completion: str, **_: object) -> Score:
        return Score(reward=1.0)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Times that answers were to take, in order; none of them is waited for."""
    times: list[float] = []

    async def sleep(seconds: float) -> None:
        times.append(seconds)

    monkeypatch.setattr(timed_turn.asyncio, "sleep", sleep)
    return times


async def answered(turn: TimedTurn, version: int, **facts: bool) -> None:
    policies = cast("Mapping[str, Policy]", {"solver": Answering(version, **facts)})
    episode = await turn.run(TASK, policies)
    assert episode.trajectories[0].reward == 1.0


def turn(**settings: Any) -> TimedTurn:
    return TimedTurn(
        **{"reward": cast("Scorer", Graded()), "seconds": 10.0, "slots": 1, "lengths": LENGTHS} | settings
    )


async def test_a_version_has_its_length_and_a_node_its_speed(
    slept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = turn()
    for version in (0, 24, 25, 60):
        await answered(timed, version)
    assert slept == pytest.approx([10, 10, 20, 5], abs=0.5)
    monkeypatch.setattr(timed_turn, "_SPEEDS", [1.0])
    set_speed(0.5)
    await answered(timed, 0)
    assert slept[-1] == pytest.approx(20, abs=0.5)


async def test_an_evaluation_takes_no_time(slept: list[float]) -> None:
    await answered(turn(), 0, is_evaluation=True)
    assert slept == []


async def test_a_slot_is_held_until_the_answer_ends() -> None:
    timed = turn(seconds=60.0)
    first = asyncio.create_task(answered(timed, 0))
    second = asyncio.create_task(answered(timed, 0))
    for _ in range(20):
        await asyncio.sleep(0)
    assert timed._slots.locked()
    assert not first.done()
    for task in (first, second):
        task.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert not timed._slots.locked()


def test_a_length_lasts_until_the_next() -> None:
    assert [length_at(LENGTHS, version) for version in (0, 24, 25, 49, 50, 999)] == [1, 1, 2, 2, 0.5, 0.5]
    assert length_at((), 7) == 1
