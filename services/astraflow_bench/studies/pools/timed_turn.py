"""A plug-in that imposes time on single-turn recipes: answers of a fixed trace, on nodes of a given speed.

Invariant: everything but time is `SingleTurn`'s own. An answer is sampled by the real engine, holds one of `slots` of
its node and ends when its time is over, so what the machine can do does not matter while it is faster; should it not
be, the log says so. `autoscaling` and `heterogeneous` name it in the runs they start.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

from astraflow.plugins import Episode, Policy, Scorer, TaskSpec
from astraflow_bench.studies.durations import Lognormal
from astraflow_bench.studies.timed_team import CALL
from astraflow_kit.log import get_logger
from astraflow_raas.workflows.single_turn import SingleTurn

log = get_logger(__name__)

_SPEEDS = [1.0]
"""Of this process's node, newest last; 1 unless `timed_node` started it."""


def set_speed(speed: float) -> None:
    """Let answers of this process take 1 / `speed` of their time from now on."""
    _SPEEDS.append(speed)


class TimedTurn:
    """`SingleTurn` whose training answers take `seconds` · length · draw / speed of the node.

    `lengths` are points (version, factor), ascending: answers sampled from that version on are `factor` times as long.
    Draws are lognormal with a 99th percentile of `tail` medians. Evaluations take no time. `moves` tell whoever starts
    the nodes when pools join and leave: they stand in the recipe, for they are part of the run.
    """

    def __init__(
        self,
        *,
        reward: Scorer,
        seconds: float,
        slots: int,
        lengths: Sequence[Sequence[float]] = ((0, 1.0),),
        tail: float = 1.0,
        seed: int = 0,
        moves: Sequence[Sequence[object]] = (),
    ) -> None:
        del moves
        self._turn = SingleTurn(reward=reward)
        self._seconds, self._lengths = seconds, lengths
        self._trace = Lognormal(tail=tail, seed=seed)
        self._slots = asyncio.Semaphore(slots)
        self._begun: dict[str, int] = defaultdict(int)
        """Episodes of each task so far."""

    async def run(self, task: TaskSpec, policies: Mapping[str, Policy]) -> Episode:
        """Answer in the trace's time."""
        if any(policy.is_evaluation for policy in policies.values()):
            return await self._turn.run(task, policies)
        drawn = self._trace.of(f"{task.task_id}/{self._begun[task.task_id]}")
        self._begun[task.task_id] += 1
        async with self._slots:
            begun_s = time.monotonic()
            episode = await self._turn.run(task, policies)
            engine_s = time.monotonic() - begun_s
            version = episode.trajectories[0].version_spans[0].version
            planned_s = self._seconds * length_at(self._lengths, version) * drawn / _SPEEDS[-1]
            await asyncio.sleep(max(0.0, planned_s - engine_s))
        log.info(CALL, version=version, planned_s=round(planned_s, 4), engine_s=round(engine_s, 4))
        return episode


def length_at(lengths: Sequence[Sequence[float]], version: int) -> float:
    """The factor of the last point at or before a version; 1 before the first."""
    return next((factor for since, factor in reversed(lengths) if version >= since), 1.0)
