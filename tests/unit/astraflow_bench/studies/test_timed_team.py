"""Imposed time changes when a call ends and nothing else; in lock step, agents take turns."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from astraflow.plugins import (
    GenerateResult,
    Message,
    Policy,
    RewardedRows,
    Score,
    Scorer,
    TaskSpec,
    VersionSpan,
)
from astraflow_bench.studies.timed_team import Phases, TimedGrpo, TimedTeam

TASK = TaskSpec(task_id="train-0", messages=(Message("user", "82 - 35?"),), data={"difference": 47})


class Speaking:
    """A policy that says what it is given; `calls` are those of all policies, in order."""

    max_new_tokens = 8
    wants_trajectory = True

    def __init__(self, role: str, text: str, calls: list[str], *, is_evaluation: bool = False) -> None:
        self.is_evaluation = is_evaluation
        self.name = self.role = role
        self._text, self._calls = text, calls

    def encode(self, messages: Sequence[Message] | str, *, tools: object = ()) -> list[int]:
        return [1]

    async def generate(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int | None = None
    ) -> GenerateResult:
        self._calls.append(self.role)
        return GenerateResult((7,), (-0.5,), (VersionSpan(0, 1, 3),), self._text, "stop")


class Graded:
    """Every answer is wrong."""

    async def __call__(self, task: TaskSpec, completion: str, **_: object) -> Score:
        return Score(reward=0.0)


def policies(calls: list[str], *, is_evaluation: bool = False) -> Mapping[str, Policy]:
    spoken = {"solver": "47", "verifier": "reject"}
    played = {role: Speaking(role, text, calls, is_evaluation=is_evaluation) for role, text in spoken.items()}
    return cast("Mapping[str, Policy]", played)


def team(**settings: Any) -> TimedTeam:
    short = {"medians": {"solver": 0.002, "verifier": 0.001}, "slots": 8, "team": {"retry": "fresh"}}
    return TimedTeam(reward=cast("Scorer", Graded()), **{**short, **settings})


async def test_an_episode_is_the_teams_own() -> None:
    calls: list[str] = []
    episode = await team().run(TASK, policies(calls))
    assert calls == ["solver", "verifier", "solver"]
    assert [(one.role, one.reward) for one in episode.trajectories] == [
        ("solver", 0.0),
        ("verifier", 1.0),
        ("solver", 0.0),
    ]


async def test_calls_wait_for_a_slot() -> None:
    one_slot, most = team(slots=1), 0
    running = 0

    async def call(number: int) -> None:
        nonlocal running, most
        async with one_slot.call("solver", "key", number, None):
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1

    await asyncio.gather(*(call(number) for number in range(4)))
    assert most == 1


async def test_an_evaluation_takes_no_time() -> None:
    slow = team(medians={"solver": 1e6, "verifier": 1e6})
    assert len((await slow.run(TASK, policies([], is_evaluation=True))).trajectories) == 3


async def test_in_lock_step_all_answers_come_before_all_verdicts() -> None:
    calls: list[str] = []
    locked = team(phase=4)
    for _ in range(2):
        await asyncio.gather(*(locked.run(TASK, policies(calls)) for _ in range(4)))
    assert calls == (["solver"] * 4 + ["verifier"] * 4 + ["solver"] * 4) * 2


async def test_an_episode_that_fails_holds_nobody_up() -> None:
    phases, reached = Phases(2), list[int]()

    async def fails() -> None:
        async with phases.episode():
            raise RuntimeError("the first call failed")

    async def goes_on() -> None:
        async with phases.episode() as place:
            for call in range(3):
                await place.turn()
                reached.append(call)
                await place.ended()

    await asyncio.gather(fails(), goes_on(), return_exceptions=True)
    assert reached == [0, 1, 2]


def test_the_advantage_is_grpos() -> None:
    rows = RewardedRows(rewards=[1.0, 0.0, 1.0, 1.0, 5.0], groups=[0, 0, 1, 1, 2], lengths=[3] * 5)
    assert TimedGrpo(seconds=0)(rows) == pytest.approx([0.70711, -0.70711, 0, 0, 0], abs=1e-4)
