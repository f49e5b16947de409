"""Plug-ins that impose time on `solver-verifier-tiny`: calls and steps of a fixed trace, in any discipline.

Invariant: everything but time is the recipe's own. A training call is made to the real engine, holds one of `slots`
and ends when its duration is over; should the engine take longer, the log says so. With `phase` set, a node makes the
calls of each agent together, as a batched multi-agent loop does. `disciplines` names these in the runs it starts.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from statistics import fmean, stdev
from typing import Any, cast

from astraflow.plugins import Episode, GenerateResult, Policy, RewardedRows, Scorer, TaskSpec
from astraflow_bench.studies.durations import Lognormal, Recorded, Trace
from astraflow_kit.log import get_logger
from astraflow_raas.workflows.solver_verifier import SolverVerifier

log = get_logger(__name__)

CALL = "timed.call"
"""The event of one call: `agent`, `number` (of its agent in the episode), `planned_s`, `engine_s`, `queued_s`."""
_GRPO = "astraflow_bench.studies.timed_team:TimedGrpo"
_EPSILON = 1e-6


def sleeping_steps(seconds: float) -> str:
    """The override with which every training step takes `seconds`, and what it computes."""
    return f'trainer.algorithm.advantage={{use: "{_GRPO}", with: {{seconds: {seconds}}}}}'


class Phases:
    """Lock step of a batch of `size` episodes: the k-th calls begin when all its (k-1)-th have ended.

    Episodes belong to batches in the order in which they begin, so one batch at a time may be out
    (`dataflow.barrier: phase`). An episode that ends is waited for no more.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._batch: list[float] = []
        """How many calls each episode of the newest batch has ended; infinity for one that is over."""
        self._moved = asyncio.Condition()

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[EpisodePlace]:
        """A place in the batch that is open, or in a new one."""
        if len(self._batch) == self._size:
            self._batch = []
        place = EpisodePlace(self, self._batch)
        try:
            yield place
        finally:
            await place.ended(math.inf)

    async def wait_for(self, batch: list[float], calls: int) -> None:
        """Return when the batch is complete and each of its episodes has ended so many calls."""
        async with self._moved:
            await self._moved.wait_for(
                lambda: not calls or (len(batch) == self._size and min(batch) >= calls)
            )

    async def move(self, batch: list[float], place: int, calls: float) -> None:
        """Note how many calls an episode has ended."""
        async with self._moved:
            batch[place] = calls
            self._moved.notify_all()


class EpisodePlace:
    """One episode in its batch."""

    def __init__(self, phases: Phases, batch: list[float]) -> None:
        self._phases, self._batch, self._index = phases, batch, len(batch)
        batch.append(0)

    async def turn(self) -> None:
        """Return when the next call of this episode may begin."""
        await self._phases.wait_for(self._batch, int(self._batch[self._index]))

    async def ended(self, calls: float | None = None) -> None:
        """Its call has ended, or with `calls` infinite the episode."""
        done = self._batch[self._index] + 1 if calls is None else calls
        await self._phases.move(self._batch, self._index, done)


class TimedTeam:
    """`SolverVerifier` with the settings `team`, whose training calls take the time of a trace.

    `medians` are seconds for each role; `tail` is the trace's p99 over its median, `lengths` a recording to draw from
    instead. `slots` calls run at a time, whatever role they are of. `phase` is the number of episodes that go in lock
    step; 0: each goes on by itself. Evaluations take no time.
    """

    roles = ("solver", "verifier")

    def __init__(
        self,
        *,
        reward: Scorer,
        team: dict[str, Any],
        medians: dict[str, float],
        slots: int,
        tail: float = 4.0,
        lengths: list[float] | None = None,
        seed: int = 0,
        phase: int = 0,
    ) -> None:
        self._team = SolverVerifier(reward=reward, **team)
        self._medians = medians
        self._trace: Trace = Recorded(lengths, seed=seed) if lengths else Lognormal(tail=tail, seed=seed)
        self._slots = asyncio.Semaphore(slots)
        self._phases = Phases(phase) if phase else None
        self._begun: dict[str, int] = defaultdict(int)
        """Episodes of each task so far."""

    async def run(self, task: TaskSpec, policies: Mapping[str, Policy]) -> Episode:
        """Play the team's episode in the trace's time."""
        if any(policy.is_evaluation for policy in policies.values()):
            return await self._team.run(task, policies)
        key = f"{task.task_id}/{self._begun[task.task_id]}"
        self._begun[task.task_id] += 1
        if self._phases is None:
            return await self._play(task, policies, key, None)
        async with self._phases.episode() as place:
            return await self._play(task, policies, key, place)

    async def _play(
        self, task: TaskSpec, policies: Mapping[str, Policy], key: str, place: EpisodePlace | None
    ) -> Episode:
        timed = {
            role: _TimedPolicy(self, policy, f"{key}/{role}", place) for role, policy in policies.items()
        }
        return await self._team.run(task, cast("Mapping[str, Policy]", timed))

    @asynccontextmanager
    async def call(
        self, agent: str, key: str, number: int, place: EpisodePlace | None
    ) -> AsyncIterator[None]:
        """Hold a slot for the call's time; what runs inside is part of it."""
        planned_s = self._medians[agent] * self._trace.of(f"{key}/{number}")
        if place is not None:
            await place.turn()
        asked_s = time.monotonic()
        async with self._slots:
            begun_s = time.monotonic()
            yield
            engine_s = time.monotonic() - begun_s
            await asyncio.sleep(max(0.0, planned_s - engine_s))
        log.info(
            CALL,
            agent=agent,
            number=number,
            planned_s=round(planned_s, 4),
            engine_s=round(engine_s, 4),
            queued_s=round(begun_s - asked_s, 4),
        )
        if place is not None:
            await place.ended()


class _TimedPolicy:
    """A policy whose generations take the trace's time; everything else is the policy's own."""

    def __init__(self, team: TimedTeam, policy: Policy, key: str, place: EpisodePlace | None) -> None:
        self._team, self._policy, self._key, self._place = team, policy, key, place
        self._num_calls = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._policy, name)

    async def generate(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int | None = None
    ) -> GenerateResult:
        number, self._num_calls = self._num_calls, self._num_calls + 1
        async with self._team.call(self._policy.role, self._key, number, self._place):
            return await self._policy.generate(prompt_ids, max_new_tokens=max_new_tokens)


class TimedGrpo:
    """GRPO's advantage after a sleep of `seconds`: a training step of a given length, plus what it computes."""

    def __init__(self, *, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, rows: RewardedRows) -> Sequence[float]:
        """One number per row: (r - mean) / (deviation + 1e-6) within its group, 0 where all are equal."""
        time.sleep(self._seconds)
        groups: dict[int, list[float]] = defaultdict(list)
        for reward, group in zip(rows.rewards, rows.groups, strict=True):
            groups[group].append(reward)
        spread = {group: stdev(own) if len(own) > 1 else 0.0 for group, own in groups.items()}
        return [
            (reward - fmean(groups[group])) / (spread[group] + _EPSILON) if spread[group] > _EPSILON else 0.0
            for reward, group in zip(rows.rewards, rows.groups, strict=True)
        ]
