"""`why` tells the truth: each named wait appears in its situation, and ends when what it names happens."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

import pytest

from astraflow.dataflow.v1 import admin_service_pb2 as pb
from astraflow.dataflow.v1 import batch_service_pb2, task_service_pb2
from support.dataflow_world import World, until, until_equal

pytestmark = pytest.mark.integration

INTENT, TRAINED = batch_service_pb2.BATCH_STAGE_INTENT, batch_service_pb2.BATCH_STAGE_TRAINED


async def waits(world: World) -> dict[str, pb.Wait]:
    """What waits now, by `stage/reason`."""
    return {f"{wait.stage}/{wait.reason}": wait for wait in (await world.why()).waits}


async def seen(world: World, name: str) -> pb.Wait:
    """The wait, as soon as it is told; it has a policy or the run, figures, a time and a way out."""
    await until(lambda: _is_told(world, name))
    wait = (await waits(world))[name]
    assert wait.detail
    assert wait.released_by
    assert wait.since_time.ToNanoseconds() > 0
    return wait


async def gone(world: World, name: str) -> None:
    """Wait until it is over."""
    await until_equal(partial(_is_told, world, name), expected=False)


async def _is_told(world: World, name: str) -> bool:
    return name in await waits(world)


@asynccontextmanager
async def session(world: World, node_id: str, **serving: int) -> AsyncIterator[None]:
    """An open working session that takes nothing and says what it serves."""
    call = world.client.open(world.client.tasks.Work)
    hello = task_service_pb2.Hello(run_id=world.run_id, node_id=node_id, incarnation=1)
    await call.write(task_service_pb2.WorkRequest(hello=hello))
    await call.write(task_service_pb2.WorkRequest(credits=task_service_pb2.Credits(serving_versions=serving)))
    try:
        yield
    finally:
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call.code()


async def test_no_node_ends_when_a_node_opens_a_working_session(world: World) -> None:
    await world.create_run()
    wait = await seen(world, "lease/no_node")
    assert "start a node" in wait.released_by
    await world.node("n1")
    assert "lease/no_node" in await waits(world), "a node that only joined takes no work"
    async with session(world, "n1"):
        await gone(world, "lease/no_node")
    await seen(world, "lease/no_node")


async def test_no_version_ends_when_the_trainer_announces_version_zero(world: World) -> None:
    await world.create_run()
    await world.node("n1")
    async with session(world, "n1"):
        wait = await seen(world, "lease/no_version")
        assert "version 0" in wait.released_by
        trainer = await world.trainer(publish_first=False)
        assert "lease/no_version" in await waits(world), "a claim alone announces nothing"
        await trainer.publish(version=0, step=0)
        await gone(world, "lease/no_version")


async def test_no_trainer_ends_when_a_trainer_claims_the_policy(world: World) -> None:
    await world.create_run()
    wait = await seen(world, "batch/no_trainer")
    assert wait.policy_id == "solver"
    assert "trainer" in wait.released_by
    await world.trainer()
    await gone(world, "batch/no_trainer")


async def test_an_exhausted_data_set_ends_when_tasks_are_submitted(world: World) -> None:
    _, node = await world.started(dataset="Empty")
    async with session(world, "n1", solver=0):
        wait = await seen(world, "lease/dataset_exhausted")
        assert "submit tasks" in wait.released_by
        await world.submit("t1")
        await gone(world, "lease/dataset_exhausted")
        assert len(await node.lease(1)) == 1


async def test_a_full_staleness_window_opens_when_a_version_is_announced_and_not_before(world: World) -> None:
    trainer, node = await world.started(dataset="Counting", groups_per_step=2, max_staleness=0)
    async with session(world, "n1", solver=0):
        await node.work(16)
        wait = await seen(world, "lease/staleness_window")
        assert wait.policy_id == "solver"
        assert "announce" in wait.released_by
        assert wait.released_by.startswith("the trainer takes a batch")
        batch = (await trainer.acquire(1)).batch
        assert "finishes step 1" in (await seen(world, "lease/staleness_window")).released_by
        await trainer.ack(batch, INTENT, TRAINED)
        assert "the version of step 1" in (await seen(world, "lease/staleness_window")).released_by
        await trainer.publish(version=1, step=1)
        await gone(world, "lease/staleness_window")


async def test_ready_groups_ends_when_nodes_finish_groups(world: World) -> None:
    trainer, node = await world.started(dataset="Counting", groups_per_step=2)
    acquiring = asyncio.create_task(trainer.acquire(1, wait_s=30))
    wait = await seen(world, "batch/ready_groups")
    assert wait.detail.startswith("0 of 2 groups are ready")
    assert "finish" in wait.released_by
    await node.work(16)
    assert (await acquiring).HasField("batch")
    await gone(world, "batch/ready_groups")


async def test_publish_ends_when_the_versions_between_are_announced(world: World) -> None:
    trainer, node = await world.started(dataset="Counting", groups_per_step=1, max_staleness=4)
    await node.work(8)
    first = (await trainer.acquire(1)).batch
    await trainer.ack(first, INTENT, TRAINED)
    acquiring = asyncio.create_task(trainer.acquire(2, base_version=2, wait_s=30))
    wait = await seen(world, "publish/publish")
    assert "announce" in wait.released_by
    await trainer.publish(version=1, step=1)
    assert (await acquiring).HasField("batch")
    await gone(world, "publish/publish")


async def test_unpublished_names_the_trained_steps_until_their_versions_are_announced(world: World) -> None:
    trainer, node = await world.started(dataset="Counting", groups_per_step=1, max_staleness=4)
    await node.work(8)
    batch = (await trainer.acquire(1)).batch
    await trainer.ack(batch, INTENT, TRAINED)
    wait = await seen(world, "publish/unpublished")
    assert "[1]" in wait.detail or "1" in wait.detail
    assert "announce" in wait.released_by
    await trainer.publish(version=1, step=1)
    await gone(world, "publish/unpublished")


async def test_an_evaluation_waits_until_a_node_serves_its_version(world: World) -> None:
    await world.started(dataset="Counting")
    wait = await seen(world, "evaluate/no_node_at_version")
    assert "version 0: 0 of 2 samples" in wait.detail
    assert "node" in wait.released_by
    async with session(world, "n1", solver=0):
        await gone(world, "evaluate/no_node_at_version")


async def test_no_capable_node_ends_when_a_node_joins_that_has_not_refused(world: World) -> None:
    _, first = await world.started(max_attempts=1)
    second = await world.node("n2")
    await world.submit("hard")
    async with session(world, "n1", solver=0), session(world, "n2", solver=0):
        for node in (first, second):
            (lease,) = await node.lease(wait_s=10)
            assert await node.fail(lease, "missing_capability"), "a refusal costs no attempt"
        assert await first.lease(wait_s=0) == []
        wait = await seen(world, "lease/no_capable_node")
        assert "for example hard" in wait.detail
        assert "join a node" in wait.released_by
        assert list((await world.why("hard")).task.refused_by) == ["n1", "n2"]
        third = await world.node("n3")
        async with session(world, "n3", solver=0):
            await gone(world, "lease/no_capable_node")
            (lease,) = await third.lease(wait_s=10)
            assert await third.complete(lease) == ["ACCEPTED", "ACCEPTED"]


async def test_a_finished_run_waits_for_nothing(world: World) -> None:
    await world.create_run()
    await world.finish()
    await until(world.is_finished)
    assert await waits(world) == {}
