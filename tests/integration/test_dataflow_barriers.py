"""Barriers make synchronous loops of the same run: never a lease or a batch on the wrong side, and no deadlock."""

import heapq
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from astraflow.dataflow.v1 import batch_service_pb2 as batches
from astraflow.rollout.v1 import task_pb2
from support.dataflow_walk import Walk, walking
from support.dataflow_world import Node, Trainer, World

pytestmark = pytest.mark.integration
FLOOR = 0.1
TRAINING_S, SLOTS = 2, 2


@dataclass
class Schedule:
    """Two slots and a trainer over the real server, in a time of their own."""

    node: Node
    trainer: Trainer
    now_s: int = 0
    running: list[tuple[int, int, task_pb2.Lease]] = field(default_factory=list)
    """When each episode ends, a number, its lease."""
    step: int = 0
    trained_at_s: int = 0
    """When the step ends that is trained now; 0 without one."""

    async def seconds_for(self, steps: int) -> int:
        """Sample and train until so many steps are done; how long that took."""
        while True:
            await self._finish()
            if self.step == steps:
                return self.now_s
            await self._begin()
            self.now_s = min([end_s for end_s, *_ in self.running] + [self.trained_at_s or 1_000])

    async def _finish(self) -> None:
        while self.running and self.running[0][0] == self.now_s:
            await self.node.complete(heapq.heappop(self.running)[2], version=self.step)
        if self.trained_at_s and self.trained_at_s == self.now_s:
            batch = (await self.trainer.acquire(self.step + 1, base_version=self.step)).batch
            await self.trainer.ack(batch, batches.BATCH_STAGE_TRAINED)
            self.step += 1
            await self.trainer.publish(version=self.step, step=self.step)
            self.trained_at_s = 0

    async def _begin(self) -> None:
        if not self.trained_at_s:
            reply = await self.trainer.acquire(self.step + 1, base_version=self.step, wait_s=0)
            self.trained_at_s = self.now_s + TRAINING_S if reply.HasField("batch") else 0
        for lease in await self.node.lease(SLOTS - len(self.running), wait_s=0):
            number = int(lease.task.task_id)
            heapq.heappush(self.running, (self.now_s + (3 if number % 2 else 1), number, lease))


@pytest.mark.parametrize(("barrier", "seconds"), [("none", 8), ("batch", 11), ("phase", 15)])
async def test_three_steps_take_what_a_person_counts(world: World, barrier: str, seconds: int) -> None:
    """The example of docs/dataflow.md: pairs of 1 s and 3 s on two slots, 2 s of training."""
    tasks = [str(number) for number in range(20)]
    trainer, node = await world.started(*tasks, barrier=barrier, group_size=1, max_staleness=2)
    assert await Schedule(node, trainer).seconds_for(steps=3) == seconds


class BarrierWalk(Walk):
    """A walk that looks at each lease and each batch."""

    barrier = "none"
    num_held = 0
    """Leases and batches that were asked for on the wrong side, and not given."""

    def _moves(self) -> list[Callable[[], Awaitable[None]]]:
        return [*[self.lease, self.train, self.finish] * 6, *super()._moves()]

    async def finish(self) -> None:
        """A whole group that no filter drops."""
        node, lease = self.rng.choice(self.leases[-3:] or [(None, None)])
        for member in lease.members if node and lease else ():
            self.number += 1
            named = {"episode_id": f"e{self.number}", "version": self.version, "reward": float(member)}
            await self._push(node, node.episode(lease, member, **named))

    async def _groups(self) -> tuple[int, int, float]:
        """Outstanding and ready groups as stored, and the share that survives filters."""
        raw = self.world.dataflow.connection.raw
        outstanding = await raw("SCARD", "af:{run}:outstanding:solver")
        ready = await raw("ZCARD", "af:{run}:ready:solver")
        acceptance = await raw("HGET", "af:{run}:policy:solver", "acceptance")
        return int(outstanding), int(ready), max(FLOOR, float(acceptance))  # type: ignore[arg-type]

    async def lease(self) -> None:
        before, _, _ = await self._groups()
        num_known = len(self.leases)
        await super().lease()
        given = [lease for _, lease in self.leases[num_known:] if not lease.required_versions]
        outstanding, ready, survives = await self._groups()
        if self.barrier == "phase" and self.batch is not None:
            assert not given, "a task was leased while the trainer trains"
            self.num_held += 1
        if outstanding > before:
            assert outstanding * survives + ready <= 2 + 1e-6, (
                "the next batch was begun before this one was bound"
            )

    async def train(self) -> None:
        fresh = self.batch is None
        outstanding, ready, _ = await self._groups()
        step = self.step
        await super().train()
        if self.barrier == "phase" and fresh and outstanding:
            assert (self.batch, self.step) == (None, step), "a batch was bound while groups are sampled"
            self.num_held += ready >= 2


class PhaseWalk(BarrierWalk):
    """Nodes and trainer exclude each other."""

    barrier = "phase"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("barrier", "kind"), [("batch", BarrierWalk), ("phase", PhaseWalk)])
async def test_whatever_happens_nothing_is_on_the_wrong_side(
    redis_url: str, tmp_path: Path, barrier: str, kind: type[BarrierWalk], seed: int
) -> None:
    async with walking(redis_url, tmp_path, seed, kind=kind, barrier=barrier) as walk:
        assert isinstance(walk, BarrierWalk)
        await walk.run(120)
        for _ in range(
            50
        ):  # when a batch is bound is a matter of time, too: some walks take longer to get there
            if walk.num_held or barrier == "batch":
                break
            await walk.run(20)
        walk.check_ids()
        assert walk.num_held or barrier == "batch", "the walk never came near the barrier"
        # However it stands, sampling and training goes on.
        before, rounds = walk.step, 0
        while walk.step == before:
            rounds += 1
            assert rounds < 200, "nothing moves any more"
            await walk.expire()
            await walk.lease()
            for node, lease in walk.leases[-6:]:
                await node.complete(lease, version=walk.version)
            await walk.train()


async def test_why_names_the_barrier_and_what_it_waits_for(world: World) -> None:
    trainer, node = await world.started("a", "b", "c", barrier="phase", max_staleness=4)
    first, second = await node.lease(3)
    assert (await node.lease_reply(1)).waiting_for == "barrier"
    assert "2 groups outstanding, 0 of 2 ready" in (await world.waits())["barrier"].detail
    await node.complete(first)
    await node.complete(second)
    batch = (await trainer.acquire(1)).batch
    assert (await node.lease_reply(1)).waiting_for == "barrier"
    assert "until step 1 of solver has its version" in (await world.waits())["barrier"].detail
    await trainer.ack(batch, batches.BATCH_STAGE_TRAINED)
    assert await node.lease(1, wait_s=0) == [], "the version is not there yet"
    await trainer.publish(version=1, step=1)
    assert [lease.task.task_id for lease in await node.lease(3)] == ["c"]


PAIR: dict[str, Any] = {
    "policies": ("solver", "verifier"),
    "groups_per_step": 1,
    "max_staleness": 4,
    "barrier": "phase",
}


async def test_a_phase_is_one_for_all_policies_and_an_ended_one_is_not_waited_for(world: World) -> None:
    await world.create_run(**PAIR)
    await world.submit("a", "b", "c")
    solver, verifier = await world.trainer("solver"), await world.trainer("verifier")
    node = await world.node()
    (lease,) = await node.lease(3)
    await node.push(node.episode(lease, 0, policies=("solver", "verifier")))
    assert (await solver.acquire(1, wait_s=0)).waiting_for == "ready_groups"
    await node.push(node.episode(lease, 1, policies=("solver", "verifier")))
    batch = (await solver.acquire(1, wait_s=0)).batch
    other = (await verifier.acquire(1, wait_s=0)).batch
    await solver.ack(batch, batches.BATCH_STAGE_TRAINED)
    await solver.publish(version=1, step=1)
    assert (await node.lease_reply(1)).waiting_for == "barrier", "the verifier trains"
    await verifier.ack(other, batches.BATCH_STAGE_SKIPPED)
    await verifier.release()
    (lease,) = await node.lease(3)
    assert list(lease.uncredited_roles) == ["verifier"], "nobody trains it any more"
    await node.complete(lease, policies=("solver",), version=1)
    assert (await solver.acquire(2, base_version=1)).HasField("batch")
