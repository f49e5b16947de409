"""Workflows for node processes under test: held at a gate, unable to run here, or unable to be made.

A gate is a file whose path the variable TEST_GATE gives the node: episodes wait until it exists, so a test decides
when work ends. Named by the recipes of integration tests.
"""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

from astraflow.plugins import (
    Episode,
    MissingCapability,
    Policy,
    PolicyUnavailable,
    Scorer,
    TaskSpec,
    Trajectory,
    TrajectoryBuilder,
)
from astraflow_raas.workflows.single_turn import SingleTurn


class Gated(SingleTurn):
    """Samples once the gate is open; without a gate at once."""

    async def run(self, task: TaskSpec, policies: Mapping[str, Policy]) -> Episode:
        """Wait, then one turn."""
        gate = os.environ.get("TEST_GATE")
        while gate and not Path(gate).exists():  # noqa: ASYNC110, ASYNC240 - the test is another process
            await asyncio.sleep(0.02)
        return await super().run(task, policies)


class NeedsSandbox(SingleTurn):
    """Runs only where TEST_SANDBOX is set."""

    async def run(self, task: TaskSpec, policies: Mapping[str, Policy]) -> Episode:
        """One turn, or the refusal."""
        if "TEST_SANDBOX" not in os.environ:
            raise MissingCapability("no sandbox on this machine; install bubblewrap")
        return await super().run(task, policies)


class CannotBeMade:
    """Says so when it is made."""

    def __init__(self, *, reward: Scorer) -> None:
        raise MissingCapability("no GPU on this machine; start the node where there is one")

    async def run(self, task: TaskSpec, policies: Mapping[str, Policy]) -> Episode:
        """Never reached."""
        raise AssertionError


class SolveAndVerify:
    """One turn of the solver, then one of the verifier; without a verifier the answer of the solver is kept."""

    roles = ("solver", "verifier")

    def __init__(self, *, reward: Scorer) -> None:
        self._reward = reward

    async def run(self, task: TaskSpec, policies: Mapping[str, Policy]) -> Episode:
        """One trajectory of each role that has an engine and is wanted."""
        made: list[Trajectory] = []
        for role in self.roles:
            if policies[role].wants_trajectory:
                turn = TrajectoryBuilder(policies[role])
                turn.add_prompt(task.messages)
                try:
                    result = await turn.generate()
                except PolicyUnavailable:
                    break
                score = await self._reward(task, result.text, policies=policies)
                made.append(turn.build(reward=score.reward))
        return Episode(tuple(made), {"team": float(len(made))})


class NeedsVerifier(SolveAndVerify):
    """Asks the verifier whatever the lease says."""

    async def run(self, task: TaskSpec, policies: Mapping[str, Policy]) -> Episode:
        """As above, but nothing without a verdict."""
        await policies["verifier"].chat(task.messages)
        return await super().run(task, policies)
