"""`why` tells the truth: each named wait appears in its situation, and ends when what it names happens."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from astraflow.dataflow.v1 import admin_service_pb2 as pb
from astraflow.dataflow.v1.batch_service_pb2 import BATCH_STAGE_INTENT as INTENT
from astraflow.dataflow.v1.batch_service_pb2 import BATCH_STAGE_TRAINED as TRAINED
from astraflow.errors import InvalidArgumentError
from support.dataflow_world import Trainer, World, served, until, until_equal
from support.work_stream import working

pytestmark = pytest.mark.integration


async def waits(world: World) -> dict[str, pb.Wait]:
    """What waits now, by `stage/reason`."""
    return {f"{wait.stage}/{wait.reason}": wait for wait in (await world.why()).waits}


async def seen(world: World, name: str, *, released_by: str) -> pb.Wait:
    """The wait, as soon as it is told; it has a policy or the run, figures, a time and this way out."""
    await until(lambda: _is_told(world, name))
    wait = (await waits(world))[name]
    assert wait.detail
    assert released_by in wait.released_by
    assert wait.since_time.ToNanoseconds() > 0
    return wait


async def gone(world: World, name: str) -> None:
    """Wait until it is over."""
    await until_equal(partial(_is_told, world, name), expected=False)


async def _is_told(world: World, name: str) -> bool:
    return name in await waits(world)


@asynccontextmanager
async def session(world: World, node_id: str = "n1", **serving: int) -> AsyncIterator[None]:
    """An open working session that takes nothing and says what it serves."""
    async with working(world, node_id) as session:
        await session.credits(0, **serving)
        yield


async def test_no_node_ends_when_a_node_opens_a_working_session(world: World) -> None:
    await world.create_run()
    await seen(world, "lease/no_node", released_by="start a node")
    await world.node("n1")
    assert "lease/no_node" in await waits(world), "a node that only joined takes no work"
    async with session(world):
        await gone(world, "lease/no_node")
    await seen(world, "lease/no_node", released_by="start a node")


async def test_no_version_ends_when_the_trainer_announces_version_zero(world: World) -> None:
    await world.create_run()
    await world.node("n1")
    async with session(world):
        await seen(world, "lease/no_version", released_by="version 0")
        trainer = await world.trainer(publish_first=False)
        assert "lease/no_version" in await waits(world), "a claim alone announces nothing"
        await trainer.publish(version=0, step=0)
        await gone(world, "lease/no_version")


async def test_no_trainer_ends_when_a_trainer_claims_the_policy(world: World) -> None:
    await world.create_run()
    wait = await seen(world, "batch/no_trainer", released_by="trainer")
    assert wait.policy_id == "solver"
    await world.trainer()
    await gone(world, "batch/no_trainer")


async def test_an_exhausted_data_set_ends_when_tasks_are_submitted(world: World) -> None:
    _, node = await world.started(dataset="Empty")
    async with session(world, solver=0):
        await seen(world, "lease/dataset_exhausted", released_by="submit tasks")
        await world.submit("t1")
        await gone(world, "lease/dataset_exhausted")
        assert len(await node.lease(1)) == 1


async def test_a_full_staleness_window_opens_when_a_version_is_announced_and_not_before(world: World) -> None:
    trainer, node = await world.started(dataset="Counting", groups_per_step=2, max_staleness=0)
    async with session(world, solver=0):
        await node.work(16)
        wait = await seen(world, "lease/staleness_window", released_by="announce")
        assert wait.policy_id == "solver"
        assert wait.released_by.startswith("the trainer takes a batch")
        batch = (await trainer.acquire(1)).batch
        await seen(world, "lease/staleness_window", released_by="finishes step 1")
        await trainer.ack(batch, INTENT, TRAINED)
        await seen(world, "lease/staleness_window", released_by="the version of step 1")
        await trainer.publish(version=1, step=1)
        await gone(world, "lease/staleness_window")


async def test_ready_groups_ends_when_nodes_finish_groups(world: World) -> None:
    trainer, node = await world.started(dataset="Counting", groups_per_step=2)
    acquiring = asyncio.create_task(trainer.acquire(1, wait_s=30))
    wait = await seen(world, "batch/ready_groups", released_by="finish")
    assert wait.detail.startswith("0 of 2 groups are ready")
    await node.work(16)
    assert (await acquiring).HasField("batch")
    await gone(world, "batch/ready_groups")


async def test_unpublished_and_publish_end_when_the_versions_between_are_announced(world: World) -> None:
    trainer, node = await world.started(dataset="Counting", groups_per_step=1, max_staleness=4)
    await node.work(8)
    await trainer.ack((await trainer.acquire(1)).batch, INTENT, TRAINED)
    wait = await seen(world, "publish/unpublished", released_by="announce")
    assert "1" in wait.detail
    acquiring = asyncio.create_task(trainer.acquire(2, base_version=2, wait_s=30))
    await seen(world, "publish/publish", released_by="announce")
    await trainer.publish(version=1, step=1)
    assert (await acquiring).HasField("batch")
    await gone(world, "publish/publish")
    await gone(world, "publish/unpublished")


async def test_an_evaluation_waits_until_a_node_serves_its_version(world: World) -> None:
    await world.started(dataset="Counting")
    wait = await seen(world, "evaluate/no_node_at_version", released_by="node")
    assert "version 0 of solver: 0 of 2 samples" in wait.detail
    async with session(world, solver=0):
        await gone(world, "evaluate/no_node_at_version")


async def test_an_environment_that_does_not_answer_is_named_with_its_node_and_soon_forgotten(
    world: World,
) -> None:
    _, node = await world.started("task", max_attempts=1)
    async with session(world, solver=0):
        (lease,) = await node.lease(wait_s=10)
        problem = "no environment Game at 10.0.0.9:7100"
        assert await node.fail(lease, "environment_unavailable", detail=problem), "it costs no attempt"
        wait = await seen(world, "lease/environment_unavailable", released_by="astraflow environment")
        assert f"n1: {problem}" in wait.detail
        (status,) = (await world.status()).nodes
        age_ms = status.last_seen_time.ToMilliseconds() - status.environment_fault_time.ToMilliseconds()
        assert abs(age_ms) < 30_000


async def test_no_capable_node_ends_when_a_node_joins_that_has_not_refused(world: World) -> None:
    _, first = await world.started("hard", max_attempts=1)
    second = await world.node("n2")
    async with session(world, solver=0), session(world, "n2", solver=0):
        for node in (first, second):
            (lease,) = await node.lease(wait_s=10)
            assert await node.fail(lease, "missing_capability"), "a refusal costs no attempt"
        assert await first.lease(wait_s=0) == []
        wait = await seen(world, "lease/no_capable_node", released_by="join a node")
        assert "for example hard" in wait.detail
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


async def test_a_claimed_trainer_is_silent_until_it_calls_again(redis_url: str, tmp_path: Path) -> None:
    async with served(redis_url, tmp_path, batch_lease_s=1) as world:
        trainer, _ = await world.started()
        wait = await seen(world, "batch/trainer_silent", released_by="another trainer takes over")
        assert (wait.policy_id, "trainer test" in wait.detail) == ("solver", True)
        await trainer.hold()
        assert "batch/trainer_silent" not in await waits(world)
        await seen(world, "batch/trainer_silent", released_by="it calls again")
        await trainer.release()
        await gone(world, "batch/trainer_silent")


async def test_a_full_window_and_what_is_sampled_into_it_are_named_while_the_other_policy_goes_on(
    world: World,
) -> None:
    both = ("solver", "verifier")
    await world.create_run(dataset="Unevaluated", policies=both, groups_per_step=1, max_staleness=0)
    solver, verifier, node = (
        await world.trainer("solver"),
        await world.trainer("verifier"),
        await world.node(),
    )
    version = dict.fromkeys(both, 0)
    async with working(world, "n1"):
        await node.work(1, policies=both, version=version)
        await solver.train(1, base_version=0)
        wait = await seen(world, "lease/staleness_window", released_by="takes a batch")
        assert (wait.policy_id, "for the other policies" in wait.detail) == ("verifier", True)
        await node.work(1, policies=both, version=version | {"solver": 1})
        await solver.train(2, base_version=1)
        wait = await seen(world, "lease/no_credit", released_by="wants_trajectory")
        assert wait.policy_id == "verifier"
        assert wait.detail.startswith("2 of its 4 trajectories (50%)")
        await verifier.train(1, base_version=0)
        await gone(world, "lease/staleness_window")


async def test_a_trainer_that_does_not_trust_the_server(world: World) -> None:
    trainer, _ = await world.started()
    await trainer.release(doubt="Redis is older")
    found = await seen(world, "batch/state_in_doubt", released_by="--accept-data-loss")
    assert found.detail == "Redis is older"
    await trainer.claim()
    await gone(world, "batch/state_in_doubt")


async def test_a_trainer_says_how_far_its_start_is_and_what_its_store_lacks(world: World) -> None:
    await world.create_run()
    before_claim = Trainer(world, "solver")
    await before_claim.hold(waiting_for="warm_start", detail="supervised steps", progress=0.45)
    wait = await seen(world, "batch/warm_start", released_by="by itself")
    assert (wait.detail, wait.progress) == ("45% done: supervised steps", 0.45)
    assert "batch/no_trainer" not in await waits(world), "there is one, and it is busy"
    trainer = await world.trainer()
    lacks = {"detail": "file:///mnt/runs is not mounted"}
    for reason in ("store_missing", "store_read_only", "store_full", "store_unreachable"):
        await trainer.hold(waiting_for=reason, **lacks)
        assert (await seen(world, f"publish/{reason}", released_by="by itself")).detail == lacks["detail"]
    await trainer.hold()
    await gone(world, "publish/store_unreachable")


@pytest.mark.parametrize("told", [{"waiting_for": "not a slug\n"}, {"progress": 1.5}, {"progress": math.nan}])
async def test_what_a_trainer_says_of_itself_is_bounded(world: World, told: dict[str, object]) -> None:
    await world.create_run()
    trainer = await world.trainer()
    with pytest.raises(InvalidArgumentError, match="must"):
        await trainer.hold(**told)


async def test_a_node_that_starts_its_engine_says_so(world: World) -> None:
    await world.started()
    async with working(world, "n1") as session:
        await session.credits(0, waiting_for="engine_start")
        wait = await seen(world, "activate/node_starting", released_by="by itself")
        assert wait.detail == "n1 starts its engine"
        await session.credits(0, solver=0)
        await gone(world, "activate/node_starting")
