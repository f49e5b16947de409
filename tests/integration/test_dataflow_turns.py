"""Policies that take turns: one has credit and gets batches, the others are frozen and wait, whoever is killed."""

import asyncio
from functools import partial
from typing import Any

import pytest

from astraflow.dataflow.v1 import admin_service_pb2 as pb
from support.dataflow_process import DataflowProcess
from support.dataflow_world import Node, Trainer, World, answered

pytestmark = pytest.mark.integration
ORDER = ("solver", "verifier")
TURNS: dict[str, Any] = {
    "policies": ORDER,
    "groups_per_step": 1,
    "max_staleness": 4,
    "dataset": "Unevaluated",
}


class Players:
    """The trainers of both policies and a node, with what they have finished."""

    def __init__(self, world: World, trainers: dict[str, Trainer], node: Node) -> None:
        self.world, self.trainers, self.node = world, trainers, node
        self.finished = dict.fromkeys(ORDER, 0)

    @classmethod
    async def join(cls, world: World, *, steps: int = 3, every: int = 2, **recipe: Any) -> "Players":
        """Join a new run in which turns have `every` steps."""
        await world.create_run(
            **TURNS | recipe, alternate_every_steps=every, overrides=[f"run.steps={steps}"]
        )
        trainers = {name: await world.trainer(name) for name in ORDER}
        return cls(world, trainers, await world.node())

    async def frozen(self) -> str:
        """The policy that waits for its turn."""
        (name,) = [item.policy_id for item in (await self.world.status()).policies if item.waits_for_turn_of]
        return name

    async def step(self, name: str) -> None:
        """Sample a group for this policy and train on it."""
        (lease,) = await answered(partial(self.node.lease, 1))
        other = next(other for other in ORDER if other != name)
        assert list(lease.uncredited_roles) == [other]
        await self.node.complete(lease, policies=(name,), version=dict(self.finished))
        done = self.finished[name]
        await self.trainers[name].train(done + 1, base_version=done)
        self.finished[name] += 1

    async def waiting(self, name: str) -> str:
        """Why this policy's trainer gets no batch."""
        return (await self.trainers[name].acquire(self.finished[name] + 1, wait_s=0.1)).waiting_for


async def test_turns_follow_the_recipe_and_the_frozen_policy_has_no_credit_and_no_batch(world: World) -> None:
    players = await Players.join(world)
    for name, other in (*[ORDER] * 2, *[ORDER[::-1]] * 2, ORDER):
        assert await players.frozen() == other
        assert await players.waiting(other) == "turn"
        await players.step(name)
    # The solver has taken all its steps, so the rest is the verifier's.
    assert await players.frozen() == "solver"
    await players.step("verifier")
    assert not any(item.waits_for_turn_of for item in (await world.status()).policies)
    await world.has_account(trained=12, dropped={})


async def test_a_turn_is_sampled_no_further_than_it_lasts(world: World) -> None:
    players = await Players.join(world)
    leases = await players.node.lease(8)
    assert len(leases) == 2, "the window has room for five groups, the turn for two"
    await players.node.complete_all(leases, policies=("solver",), version=0)
    assert await players.node.lease(8, wait_s=0.1) == []
    await players.trainers["solver"].train(1, base_version=0)
    assert await players.node.lease(8, wait_s=0.1) == []


async def test_a_frozen_trainer_gets_its_batch_when_its_turn_comes(world: World) -> None:
    players = await Players.join(world, every=1)
    waiting = asyncio.create_task(players.trainers["verifier"].acquire(1, wait_s=30))
    await world.until(lambda _: True)
    await players.step("solver")
    (lease,) = await players.node.lease(1)
    await players.node.complete(lease, policies=("verifier",), version=0)
    assert (await waiting).batch.step == 1


async def test_why_tells_whose_turn_it_is_and_calls_nobody_silent(world: World) -> None:
    players = await Players.join(world)
    await players.step("solver")
    await players.waiting("verifier")
    wait = (await world.waits())["turn"]
    assert (wait.policy_id, wait.stage) == ("verifier", "batch")
    assert wait.detail == "it is frozen after step 0: it is the turn of solver"
    assert wait.released_by.startswith("solver finishes step 2")
    assert not {"trainer_silent", "no_credit"} & set(await world.waits())
    await players.trainers["solver"].release()
    assert "in its turn" in (await world.waits())["no_trainer"].detail


async def test_under_all_a_frozen_policy_is_not_waited_for(world: World) -> None:
    players = await Players.join(world, admit="all")
    await players.step("solver")
    assert await players.frozen() == "verifier"


@pytest.mark.slow
@pytest.mark.timeout(90)
async def test_a_server_killed_in_a_turn_goes_on_with_it(process: DataflowProcess) -> None:
    process.start()
    async with process.world(retry_s=30) as world:
        players = await Players.join(world)
        await players.step("solver")
        process.kill()
        process.start()
        state: list[pb.PolicyStatus] = list((await answered(world.status)).policies)
        assert [item.waits_for_turn_of for item in state] == ["", "solver"]
        await players.step("solver")
        assert await answered(players.frozen) == "solver"
        await players.step("verifier")
