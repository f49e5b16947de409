"""Crashes: of the server at its named moments, of Redis, and what a second server sees."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from astraflow.client import AsyncClient, RetryPolicy
from astraflow.dataflow.v1.batch_service_pb2 import BATCH_STAGE_TRAINED as TRAINED
from astraflow.errors import ConflictError, UnavailableError
from astraflow_kit.failpoints import read_hits
from support.dataflow_process import DataflowProcess
from support.dataflow_world import World, answered, served
from support.valkey import ValkeyServer
from support.work_stream import working

Result = TypeVar("Result")


async def surviving(
    process: DataflowProcess, call: Callable[[], Awaitable[Result]], *, lost_answer: Result | None = None
) -> Result | None:
    """Call; when the armed failpoint killed the server, start it again and repeat the call."""
    try:
        return await call()
    except UnavailableError:
        process.wait_until_ended()
        process.kill()
        process.start()
    try:
        return await answered(call)
    except ConflictError:
        return lost_answer


MOMENTS = [
    *("committed", "bound"),
    # In ci tests/chaos/test_kills.py kills a server at all of them.
    *(pytest.param(moment, marks=pytest.mark.soak) for moment in ("leased", "storing", "acked", "published")),
]


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_server_killed_at_a_named_moment_loses_and_doubles_nothing(
    process: DataflowProcess, moment: str
) -> None:
    skip = 2 if moment == "published" else 1  # the first publish is version 0, before any work
    process.start(failpoints=f"dataflow.{moment}=kill@{skip}")
    async with process.world() as world:
        trainer, node = await world.started(dataset="Counting", lease_ttl_s=0.5)
        leases = []
        while len(leases) < 2:
            leases += await surviving(process, lambda: node.lease(2, wait_s=2)) or []
        for episode in [node.episode(lease, member) for lease in leases for member in lease.members]:
            await surviving(process, partial(node.push, episode))
        batch = (await surviving(process, lambda: trainer.acquire(1))).batch  # type: ignore[union-attr]
        assert len(batch.items) == 4
        await surviving(process, lambda: trainer.ack(batch, TRAINED))
        await surviving(process, lambda: trainer.publish(version=1, step=1))
        await world.has_account(ingested=4, trained=4, dropped={})
    hit = read_hits(process.failpoints_log)[skip - 1]
    assert (hit.name, hit.acted) == (f"dataflow.{moment}", True)


async def test_two_servers_over_one_redis_serve_one_run(redis_url: str, tmp_path: Path) -> None:
    async with served(redis_url, tmp_path) as one, served(redis_url, tmp_path) as other:
        await one.create_run(dataset="Counting")
        other.run_id = one.run_id
        trainer, node = await other.trainer(), await one.node()
        waiting = asyncio.create_task(trainer.acquire(1, wait_s=20))
        await node.work(2)
        assert len((await waiting).batch.items) == 4
        assert (await one.status()).trajectories == (await other.status()).trajectories


@pytest.fixture
async def own_world(own_valkey: ValkeyServer, tmp_path: Path) -> AsyncIterator[World]:
    """A server over it."""
    async with served(own_valkey.url, tmp_path) as world:
        yield world


async def test_a_killed_redis_is_unavailable_and_then_goes_on(
    own_valkey: ValkeyServer, own_world: World
) -> None:
    trainer, node = await own_world.started(dataset="Counting")
    leases = await node.lease(2)
    await node.push(node.episode(leases[0], 0))
    await asyncio.sleep(1.2)  # beyond appendfsync everysec, though SIGKILL keeps the page cache anyway
    own_valkey.kill()
    with pytest.raises(UnavailableError):
        await node.push(node.episode(leases[0], 1))
    own_valkey.start()
    await answered(lambda: node.push(node.episode(leases[0], 1)))
    await answered(lambda: node.complete(leases[1]))
    assert len((await answered(lambda: trainer.acquire(1))).batch.items) == 4
    await own_world.has_account()


async def test_a_redis_that_lost_its_last_second_gets_the_episodes_again(
    own_valkey: ValkeyServer, own_world: World
) -> None:
    world = own_world
    trainer, node = await world.started(dataset="Counting", groups_per_step=1)
    (lease,) = await node.lease()
    await node.push(node.episode(lease, 0))
    first = await world.dataflow.connection.data_incarnation()
    own_valkey.kill()
    own_valkey.truncate_log(own_valkey.log_bytes - 1500)  # most of the last push
    own_valkey.start()
    await answered(lambda: node.complete(lease))
    assert await world.dataflow.connection.data_incarnation() != first
    assert len((await answered(lambda: trainer.acquire(1, wait_s=20))).batch.items) == 2
    await world.has_account(ingested=2, in_batch=2)


async def test_functions_that_redis_lost_are_loaded_again(world: World) -> None:
    _, node = await world.started(dataset="Counting")
    await world.dataflow.connection.raw("FUNCTION", "FLUSH")
    assert len(await node.lease(1)) == 1


async def test_a_client_that_retries_outlives_a_server_restart(process: DataflowProcess) -> None:
    process.start()
    async with process.world() as world:
        await world.create_run(dataset="Counting")
    process.kill()
    async with AsyncClient(process.address, retry=RetryPolicy(total_s=30)) as client:
        patient = World(dataflow=None, client=client, address=process.address, run_id="run")  # type: ignore[arg-type]
        asking = asyncio.create_task(patient.status())
        await asyncio.sleep(0.3)
        process.start()
        assert (await asking).run_id == "run"


async def test_a_session_ends_when_redis_was_restarted_so_that_its_node_joins_again(
    own_valkey: ValkeyServer, own_world: World
) -> None:
    await own_world.create_run()
    await own_world.node()
    async with working(own_world) as session:
        await own_world.until(lambda status: status.nodes[0].connected)
        own_valkey.kill()
        own_valkey.start()
        assert (await session.call.code()).name == "UNAVAILABLE"
