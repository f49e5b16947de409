"""Plug-ins that make `solver-verifier-tiny` comparable: two games in one task, and steps of a given length.

Invariant: what a policy meets in `SideBySide` depends on the task alone, never on the other policy, so whether that one
is trained changes nothing but what both share: server, node and machine. `astraflow_bench.policies` names these in the
runs that it starts.
"""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence

from astraflow.plugins import (
    Episode,
    Message,
    Policy,
    RewardedRows,
    Scorer,
    TaskSpec,
    Trajectory,
    TrajectoryBuilder,
)
from astraflow_raas.workflows.prompts import fill, problem_of

_SLIPS = (-10, -1, 1, 10)


class SideBySide:
    """Plays roles `solver` and `verifier`, each for itself: the solver answers, once, and earns the recipe's reward;
    the verifier judges a proposal that the task draws, right half of the time, and earns 1 for a right verdict.

    The correct answer is the integer `answer` of the task's data; the verifier sees `verifier_prompt` (places
    `{problem}` and `{answer}`) and ends with `approve` or `reject`. Each game takes `seconds` longer than its call. A
    role whose trajectory nobody wants is not asked.
    """

    roles = ("solver", "verifier")

    def __init__(
        self, *, reward: Scorer, verifier_prompt: str, answer: str = "difference", seconds: float = 0.0
    ) -> None:
        self._reward = reward
        self._verifier_prompt = verifier_prompt
        self._answer = answer
        self._seconds = seconds

    async def run(self, task: TaskSpec, policies: Mapping[str, Policy]) -> Episode:
        """Return a trajectory of each role that wants one."""
        games = {"solver": self._solve, "verifier": self._verify}
        played = (
            game(task, policies[role]) for role, game in games.items() if policies[role].wants_trajectory
        )
        return Episode(tuple(await asyncio.gather(*played)))

    async def _solve(self, task: TaskSpec, policy: Policy) -> Trajectory:
        turn, text = await self._ask(policy, task.messages)
        return turn.build(reward=(await self._reward(task, text)).reward)

    async def _verify(self, task: TaskSpec, policy: Policy) -> Trajectory:
        draw = random.Random(f"proposal/{task.task_id}")
        is_right = draw.random() < 0.5
        proposal = task.data[self._answer] + (0 if is_right else draw.choice(_SLIPS))
        question = fill(self._verifier_prompt, problem=problem_of(task.messages), answer=str(proposal))
        turn, text = await self._ask(policy, [Message("user", question)])
        return turn.build(reward=float(text.strip().lower().endswith("approve" if is_right else "reject")))

    async def _ask(self, policy: Policy, messages: Sequence[Message]) -> tuple[TrajectoryBuilder, str]:
        turn = TrajectoryBuilder(policy)
        turn.add_prompt(messages)
        result = await turn.generate()
        await asyncio.sleep(self._seconds)
        return turn, result.text


class Sleeping:
    """An advantage that takes `seconds` and is 1 or -1 in turns: a training step of a length of its own."""

    def __init__(self, *, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, rows: RewardedRows) -> Sequence[float]:
        """One number per row."""
        time.sleep(self._seconds)
        return [1.0 - 2.0 * (number % 2) for number in range(len(rows.rewards))]
