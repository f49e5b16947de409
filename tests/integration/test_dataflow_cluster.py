"""The dataflow server on a Redis Cluster: each run on one primary, and what becomes of it when that fails."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from astraflow.dataflow.v1.batch_service_pb2 import BATCH_STAGE_TRAINED as TRAINED
from astraflow.dataflow.v1.run_service_pb2 import DeleteRunResponse, ListRunsRequest
from astraflow.errors import UnavailableError
from astraflow.rollout.v1.task_pb2 import Lease
from support.dataflow_world import Node, Trainer, World, answered, served, until
from support.valkey_cluster import ValkeyCluster, ValkeyNode, run_on, running_cluster, wait_until
from support.work_stream import working

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(120)]


@asynccontextmanager
async def a_run_on(
    cluster: ValkeyCluster, home: ValkeyNode, folder: Path, **settings: object
) -> AsyncIterator[tuple[World, Trainer, Node]]:
    """A server with a run that lives on this primary, of batches of two groups."""
    async with served(cluster.url, folder, **settings) as world:
        yield world, *await world.started(name=run_on(cluster, home), dataset="Counting", max_staleness=8)


async def beside(world: World, name: str) -> tuple[World, Trainer, Node]:
    """Another run of the same server."""
    other = World(dataflow=world.dataflow, client=world.client, address=world.address)
    return other, *await other.started(name=name, dataset="Counting", max_staleness=8)


async def trains(trainer: Trainer, node: Node, step: int) -> None:
    """Take a step, whoever is away for a moment."""
    num_ready = 0
    while num_ready < 2:
        for lease in await answered(lambda: node.lease(1, wait_s=2)):
            await answered(partial(node.complete, lease))
            num_ready += 1
    batch = (await answered(lambda: trainer.acquire(step, base_version=step - 1))).batch
    await answered(lambda: trainer.ack(batch, TRAINED))
    await answered(lambda: trainer.publish(version=step, step=step))


async def data_reasons(world: World) -> list[str]:
    """What the run's Redis lacks."""
    return [wait.reason for wait in (await answered(world.why)).waits if wait.stage == "data"]


async def until_data_waits(world: World, *reasons: str) -> None:
    """Wait until this is what the run's Redis lacks."""

    async def is_so() -> bool:
        return await data_reasons(world) == [*reasons]

    await until(is_so)


async def test_each_run_lives_on_one_primary_and_any_server_serves_any(
    cluster: ValkeyCluster, tmp_path: Path
) -> None:
    names = [run_on(cluster, node) for node in cluster.nodes]
    async with served(cluster.url, tmp_path) as one, served(cluster.url, tmp_path) as two:
        for name in names:
            _, trainer, node = await beside(one, name)
            await trains(trainer, node, 1)
            other = World(dataflow=two.dataflow, client=two.client, address=two.address, run_id=name)
            trainer.world = node.world = other
            await trains(trainer, node, 2)
            await other.has_account(ingested=8, trained=8)
        listed = (await two.client.runs.ListRuns(ListRunsRequest())).runs
    assert {run.run_id for run in listed} == {*names}
    for name, home in zip(names, cluster.nodes, strict=True):
        where = [node for node in cluster.nodes if any(f"{{{name}}}" in key for key in node.ask("KEYS", "*"))]
        assert where == [home]


async def test_a_primary_that_is_away_stops_its_runs_only_and_loses_nothing(
    cluster: ValkeyCluster, tmp_path: Path
) -> None:
    registry = cluster.home("")
    home, elsewhere = (node for node in cluster.nodes if node is not registry)
    async with a_run_on(cluster, home, tmp_path) as (world, trainer, node):
        other, other_trainer, other_node = await beside(world, run_on(cluster, elsewhere))
        await trains(trainer, node, 1)
        (lease,) = await node.lease(1)
        assert await node.outcome(node.episode(lease, 0)) == "ACCEPTED"
        await world.status()
        with cluster.without(home):
            with pytest.raises(UnavailableError):
                await node.push(node.episode(lease, 1))
            await trains(other_trainer, other_node, 1)
            await until_data_waits(world, "redis_silent")
            assert await data_reasons(other) == []
            async with served(cluster.url, tmp_path) as late:  # one that starts now serves the rest
                late.run_id = other.run_id
                assert (await late.status()).trajectories.trained == 4
        assert await answered(lambda: node.outcome(node.episode(lease, 0))) == "DUPLICATE"
        assert await answered(lambda: node.outcome(node.episode(lease, 1))) == "ACCEPTED"
        await trains(trainer, node, 2)
        await world.has_account(dropped={})
        await until_data_waits(world)


async def test_without_the_primary_of_the_registry_loaded_runs_go_on(
    cluster: ValkeyCluster, tmp_path: Path
) -> None:
    registry = cluster.home("")
    home = next(node for node in cluster.nodes if node is not registry)
    async with a_run_on(cluster, home, tmp_path) as (world, trainer, node):
        with cluster.without(registry):
            await trains(trainer, node, 1)
            with pytest.raises(UnavailableError):
                await World(dataflow=world.dataflow, client=world.client, address="").create_run(name="new")
        await answered(lambda: world.create_run(name=run_on(cluster, registry)))


async def test_a_cluster_that_refuses_because_most_primaries_are_gone_is_named_until_they_are_back(
    cluster: ValkeyCluster, tmp_path: Path
) -> None:
    registry = cluster.home("")
    home, elsewhere = (node for node in cluster.nodes if node is not registry)
    async with a_run_on(cluster, home, tmp_path) as (world, trainer, node):
        await trains(trainer, node, 1)
        (lease,) = await node.lease(1)
        await world.status()
        with cluster.without(registry, elsewhere):
            # The run's own primary lives, and refuses as soon as it knows that it is in a minority.
            await until(partial(_is_refused_as, "redis_cluster_down", node, lease))
            await until_data_waits(world, "redis_silent")
            (wait,) = [wait for wait in (await world.why()).waits if wait.stage == "data"]
            assert "the Redis cluster refuses: " in wait.detail
            assert "bring its missing primaries back" in wait.detail
        assert await answered(lambda: node.outcome(node.episode(lease, 0))) in ("ACCEPTED", "DUPLICATE")
        await answered(lambda: node.push(node.episode(lease, 1)))
        await trains(trainer, node, 2)
        await world.has_account(ingested=10, dropped={})
        await until_data_waits(world)


async def _is_refused_as(reason: str, node: Node, lease: Lease) -> bool:
    """Whether a push is answered so; one of before the primary knows is taken."""
    try:
        await node.push(node.episode(lease, 0))
    except UnavailableError as refused:
        return refused.metadata.get("reason") == reason
    return False


async def test_a_replica_that_takes_over_is_a_redis_that_began_again(tmp_path: Path) -> None:
    with running_cluster(tmp_path / "cluster", replicated=[0]) as cluster:
        primary, replica = cluster.nodes[0], cluster.nodes[3]
        async with a_run_on(cluster, primary, tmp_path) as (world, trainer, node):
            other, other_trainer, other_node = await beside(world, run_on(cluster, cluster.nodes[1]))
            await trains(trainer, node, 1)
            before = [
                (await each.join("n2", max_concurrent_tasks=1)).data_incarnation for each in (world, other)
            ]
            async with working(world) as session:
                await session.credits(0)
                await world.until(lambda status: any(each.connected for each in status.nodes))
                wait_until(
                    lambda: _offset(primary, "master_repl_offset") == _offset(replica, "slave_repl_offset")
                )
                primary.kill()
                assert (await session.call.code()).name == "UNAVAILABLE"
            await trains(trainer, node, 2)
            await trains(other_trainer, other_node, 1)
            after = [
                (await each.join("n2", max_concurrent_tasks=1)).data_incarnation for each in (world, other)
            ]
            assert [then == now for then, now in zip(before, after, strict=True)] == [False, True]
            await world.has_account(ingested=8, trained=8, dropped={})
            assert cluster.home(world.run_id) is replica


def _offset(node: ValkeyNode, name: str) -> str:
    return next(
        line for line in str(node.ask("INFO", "replication")).split() if line.startswith(name)
    ).partition(":")[2]


async def test_a_slot_that_is_handed_over_takes_its_run_with_it(
    cluster: ValkeyCluster, tmp_path: Path
) -> None:
    home, to = cluster.nodes[:2]
    async with a_run_on(cluster, home, tmp_path) as (world, trainer, node):
        await trains(trainer, node, 1)
        joined = await world.join("n2", max_concurrent_tasks=1)
        cluster.move(world.run_id, to)
        try:
            await trains(trainer, node, 2)
            assert cluster.home(world.run_id) is to
            assert (
                await world.join("n2", max_concurrent_tasks=1)
            ).data_incarnation != joined.data_incarnation
            await world.has_account(ingested=8, trained=8, dropped={})
            deleted = await world.ask(DeleteRunResponse, run_id=world.run_id, force=True)
            assert deleted.deleted_keys > 20
        finally:
            cluster.move(world.run_id, home)
    assert [key for key in cluster.all_keys() if f"{{{world.run_id}}}" in key] == []


async def test_a_run_waits_while_its_slot_is_handed_over_key_by_key(
    cluster: ValkeyCluster, tmp_path: Path
) -> None:
    home, to = cluster.nodes[:2]
    async with a_run_on(cluster, home, tmp_path) as (world, trainer, node):
        await trains(trainer, node, 1)
        (lease,) = await node.lease(1)
        try:
            with cluster.moving(world.run_id, to):
                for call in (node.lease(1), node.push(node.episode(lease, 0)), trainer.hold()):
                    with pytest.raises(UnavailableError) as refused:
                        await call
                    assert refused.value.metadata["reason"] == "redis_slot_moves"
            assert await answered(lambda: node.outcome(node.episode(lease, 0))) == "ACCEPTED"
            await answered(lambda: node.push(node.episode(lease, 1)))
            await trains(trainer, node, 2)
            await world.has_account(ingested=10, dropped={})
        finally:
            wait_until(lambda: cluster.home(world.run_id) is to)
            cluster.move(world.run_id, home)
