"""Routes and needs of a served run: groups go where the recipe says, counted once, and no batch waits for ever."""

import asyncio

import pytest

from astraflow.dataflow.v1 import trace_pb2
from support.dataflow_process import DataflowProcess
from support.dataflow_world import World

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROUTES = (
    "[{name: solved, when: {min_reward: 1}, to: evaluation}, {name: kept, when: {max_reward: -1}, to: archive}, "
    "{name: poor, when: {max_reward: 0}, to: drop}]"
)
SIGNAL = "{min_signal: 1, max_wait_s: 600}"


async def test_groups_go_where_routes_say_and_are_counted_there(process: DataflowProcess) -> None:
    process.start()
    async with process.world(retry_s=20) as world:
        _, node = await world.started(
            "t1", "t2", "t3", "t4", routes=ROUTES, archive="{keep: [trained]}", max_staleness=8
        )
        for reward in (1.0, -1.0, 0.0):
            (lease,) = await node.lease(1)
            await node.complete(lease, reward=reward)
        await node.work(1)
        await world.until(lambda status: not status.trajectories.assembling)
        process.kill()
        process.start()
        # The archive has what a route sent there, though it keeps nothing else that is dropped.
        await world.until(lambda status: status.archive.waiting + status.archive.written == 2)
        await world.has_account(
            ingested=8, ready=2, evaluated=2, dropped={"routed_kept": 2, "routed_poor": 2}, assembling=0
        )
        answer = await world.why("t1")
        counts = [
            (count.verdict, count.groups, count.trajectories, count.mean_reward) for count in answer.routes
        ]
        assert counts == [
            ("evaluated_solved", 1, 2, 1.0),
            ("routed_kept", 1, 2, -1.0),
            ("routed_poor", 1, 2, 0.0),
        ]
        assert {item.place for item in answer.task.trajectories} == {trace_pb2.TRAJECTORY_PLACE_EVALUATED}
        (policy,) = (await world.status()).policies
        assert policy.acceptance < 1  # more tasks are leased for those that went elsewhere


async def test_a_batch_waits_for_what_it_needs_and_takes_it_when_it_comes(world: World) -> None:
    trainer, node = await world.started(dataset="Unevaluated", batch_needs=SIGNAL, max_staleness=8)
    await node.make_ready(2, reward=1.0)
    assert (await trainer.acquire(1, wait_s=0)).waiting_for == "batch_needs"
    wait = (await world.waits())["batch_needs"]
    assert wait.detail.endswith("the ready groups have 0 of 1 groups of unequal rewards")

    # The next group has unequal rewards: whoever waits is woken, and takes it with the oldest.
    waiting = asyncio.create_task(trainer.acquire(1, wait_s=30))
    (task_id,) = await node.work(1)
    batch = (await waiting).batch
    assert [item.task_id for item in batch.items] == ["train-0", "train-0", task_id, task_id]
    assert "batch_needs" not in await world.waits()
    await world.has_account(in_batch=4, ready=2)


async def test_a_batch_that_cannot_get_what_it_needs_is_bound_all_the_same(world: World) -> None:
    # Nobody draws tasks, so only those that are leased may come.
    trainer, node = await world.started("t1", "t2", "t3", batch_needs=SIGNAL, max_staleness=8)
    leases = await node.lease(3)
    await node.complete_all(leases[:2], reward=1.0)
    assert (await trainer.acquire(1, wait_s=0)).waiting_for == "batch_needs"
    waiting = asyncio.create_task(trainer.acquire(1, wait_s=30))
    await node.fail(leases[2], "bad_task", retryable=False)
    assert (await waiting).HasField("batch")


async def test_a_full_window_gives_way(world: World) -> None:
    trainer, node = await world.started(dataset="Unevaluated", batch_needs=SIGNAL, max_staleness=0)
    await node.make_ready(2, reward=1.0)
    assert (await trainer.acquire(1, wait_s=0)).HasField("batch")


async def test_the_longest_wait_is_counted_over_killed_servers(process: DataflowProcess) -> None:
    process.start()
    async with process.world(retry_s=20) as world:
        needs = "{min_signal: 1, max_wait_s: 3}"
        trainer, node = await world.started(dataset="Unevaluated", batch_needs=needs, max_staleness=8)
        await node.make_ready(2, reward=1.0)
        assert (await trainer.acquire(1, wait_s=0)).waiting_for == "batch_needs"
        process.kill()
        process.start()
        assert (await trainer.acquire(1, wait_s=30)).HasField("batch")
