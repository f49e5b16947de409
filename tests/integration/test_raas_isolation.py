"""Engines of one node fail apart: while one policy has none, the other goes on training. Real node processes with CPU
engines, a real dataflow server over a real Valkey, real weights."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from astraflow.dataflow.v1.admin_service_pb2 import StatusResponse
from astraflow.dataflow.v1.batch_service_pb2 import BATCH_STAGE_TRAINED as TRAINED
from support.dataflow_world import Trainer, World
from support.node_process import NodeProcess, WeightPublisher, announce, node_of, tiny_policy

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]
BOTH = ("solver", "verifier")
WORKFLOW = "support.node_plugins:SolveAndVerify"


@dataclass
class TwoPolicies:
    """A run of two policies whose trainers train whatever is ready, and a node that serves both."""

    world: World
    node: NodeProcess

    async def steps(self) -> dict[str, int]:
        status = await self.world.status()
        return {item.policy_id: item.last_finished_step for item in status.policies}

    async def after(self, policy_id: str, *, more: int) -> dict[str, int]:
        """The steps of both once this policy has made so many more."""
        wanted = (await self.steps())[policy_id] + more

        def is_reached(now: StatusResponse) -> bool:
            return any(p.policy_id == policy_id and p.last_finished_step >= wanted for p in now.policies)

        await self.world.until(is_reached, within_s=180)
        return await self.steps()

    async def failures(self) -> set[object]:
        return {event["reason"] for event in self.node.events("episode.failed")}

    @asynccontextmanager
    async def without(self, policy_id: str, number: signal.Signals) -> AsyncIterator[None]:
        """Send this signal to every engine of a policy, also to those that the node starts meanwhile. What is stopped
        then goes on at the end."""

        def send(to: signal.Signals) -> None:
            for engine in self.node.engines:
                with suppress(psutil.NoSuchProcess):
                    if f"/{policy_id}" in " ".join(engine.cmdline()):
                        engine.send_signal(to)

        async def keep_sending() -> None:
            while True:
                send(number)
                await asyncio.sleep(0.1)

        sending = asyncio.create_task(keep_sending())
        try:
            yield
        finally:
            sending.cancel()
            send(signal.SIGCONT)


async def _train(trainer: Trainer, weights: WeightPublisher) -> None:
    """Train step after step until cancelled."""
    step = 1
    while True:
        batch = (await trainer.acquire(step, base_version=step - 1, wait_s=30)).batch
        if batch.items:
            await trainer.ack(batch, TRAINED)
            await announce(trainer, weights, step=step)
            step += 1


@asynccontextmanager
async def two_policies(
    world: World, folder: Path, *, workflow: str = WORKFLOW, **recipe: object
) -> AsyncIterator[TwoPolicies]:
    store, checkpoint = folder / "store", tiny_policy(folder / "policy")
    raas = {"workflow": workflow, "episode_timeout_s": 20, "max_concurrent_tasks": 4}
    named = {"dataset": "Unevaluated", "policies": BOTH, "groups_per_step": 1, "raas": raas} | recipe
    await world.create_run(store_uri=store.as_uri(), **named)
    training = []
    for name in BOTH:
        trainer = await world.trainer(name, publish_first=False)
        weights = WeightPublisher.open(store, run_id="run", policy_id=name, checkpoint=checkpoint)
        await announce(trainer, weights, step=0)
        training.append(asyncio.create_task(_train(trainer, weights)))
    try:
        async with node_of(world.address, folder) as node:
            yield TwoPolicies(world, node)
    finally:
        for task in training:
            task.cancel()


# In ci tests/e2e/test_two_policies.py kills engines.
@pytest.mark.parametrize("number", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.soak)])
async def test_one_policy_goes_on_while_the_other_has_no_engine(
    world: World, tmp_path: Path, number: signal.Signals
) -> None:
    async with two_policies(world, tmp_path) as run:
        await run.after("verifier", more=1)
        async with run.without("verifier", number):
            # What was sampled before it went may still be trained on: the window bounds it.
            before = await run.after("solver", more=3)
            after = await run.after("solver", more=4)
            assert after["verifier"] - before["verifier"] <= 1
        await run.after("verifier", more=2)
        assert await run.failures() <= {"engine_down"}
        assert not (await world.dead_letters()).total
        await world.has_account()


async def test_a_workflow_that_needs_the_lost_policy_waits_and_loses_no_attempt(
    world: World, tmp_path: Path
) -> None:
    async with two_policies(world, tmp_path, workflow=f"{WORKFLOW.partition(':')[0]}:NeedsVerifier") as run:
        await run.after("solver", more=1)
        async with run.without("verifier", signal.SIGKILL):
            await run.world.until(lambda now: now.nodes[0].waiting_for == "engine_start", within_s=120)
        await run.after("solver", more=2)
        assert await run.failures() <= {"engine_down"}
        assert not (await world.dead_letters()).total


async def test_every_planned_evaluation_gets_all_its_samples_while_both_policies_swap(
    world: World, tmp_path: Path
) -> None:
    settings = "{every_versions: 2, num_samples: 8, final_samples: 8}"
    async with two_policies(world, tmp_path, dataset="Counting", evaluation=settings) as run:
        passed = await world.until(
            lambda now: len([e for e in now.evaluations if e.complete]) >= 10, within_s=180
        )
        assert {e.version for e in passed.evaluations if e.policy_id == "verifier"} > {0}
        complete = [e for e in passed.evaluations if e.complete]
        assert {(e.num_samples, e.num_planned) for e in complete} == {(8, 8)}
        assert {e.metrics["team"] for e in complete} == {2.0}, "both roles were sampled in each episode"
        assert len({e.evaluation_id for e in complete}) == len(complete) / 2
        assert not await run.failures()
