"""Durability: what was acknowledged as safe survives a power loss, and what was not is pushed again once.

A power loss is a SIGKILL of Redis and an append-only file cut to what the disk had: killing alone keeps the page cache.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from astraflow.dataflow.v1 import durability_pb2
from astraflow.dataflow.v1.batch_service_pb2 import BATCH_STAGE_TRAINED as TRAINED
from astraflow.dataflow.v1.trajectory_service_pb2 import (
    OUTCOME_ACCEPTED,
    OUTCOME_DUPLICATE,
    PushEpisodeResponse,
)
from astraflow.errors import FencedError, IncompatibleError, UnavailableError, VersionGapError
from astraflow.rollout.v1.task_pb2 import Lease
from astraflow_dataflow.store import durability
from astraflow_dataflow.store.connection import Connection
from support.dataflow_world import Node, Trainer, World, answered, served, until
from support.valkey import ValkeyServer
from support.work_stream import soon, working

FSYNCED, REPLICATED = durability_pb2.DURABILITY_FSYNCED, durability_pb2.DURABILITY_REPLICATED


@pytest.fixture
def safe_valkey(redis_binary: str, tmp_path: Path) -> Iterator[ValkeyServer]:
    """A server of this test alone that can say what is on its disk, whatever its release."""
    options = ["--appendfsync", "always"]
    with ValkeyServer(tmp_path / "safe", binary=redis_binary, options=options) as server:
        yield server


async def has_waitaof(url: str) -> bool:
    """Whether this release can say what is on its disk under everysec."""
    async with Connection(url) as connection:
        return (await durability.ability_of(connection)).has_waitaof


async def lose_power(server: ValkeyServer, *, disk_has: int) -> None:
    """Kill, keep what the disk had, start again."""
    server.kill()
    assert server.log_bytes >= disk_has
    server.truncate_log(disk_has)
    await asyncio.to_thread(server.start)


@dataclass
class Running:
    """A run of one-group steps with a trainer and a node."""

    world: World
    trainer: Trainer
    node: Node

    async def push(self, lease: Lease, member: int) -> PushEpisodeResponse:
        """Push a member, also while the server or its Redis is away."""
        return await answered(lambda: self.node.push_reply(self.node.episode(lease, member)))


@asynccontextmanager
async def running(server: ValkeyServer, folder: Path, **settings: object) -> AsyncIterator[Running]:
    """A server with such a run."""
    async with served(server.url, folder, **settings) as world:
        yield Running(world, *await world.started(dataset="Counting", groups_per_step=1, max_staleness=8))


async def test_positions_rise_by_one_and_a_repeated_push_has_no_new_one(world: World) -> None:
    _, node = await world.started(dataset="Counting")
    (lease,) = await node.lease()
    assert [(await node.push(node.episode(lease, member))).position for member in (0, 1, 0)] == [1, 2, 2]


async def test_the_watermark_follows_the_commits_as_far_as_redis_can_tell(
    own_valkey: ValkeyServer, tmp_path: Path
) -> None:
    async with running(own_valkey, tmp_path) as run:
        (lease,) = await run.node.lease()
        first = (await run.push(lease, 0)).result
        assert first.durability == durability_pb2.DURABILITY_MEMORY
        if not await has_waitaof(own_valkey.url):
            await asyncio.sleep(0.2)
            assert not (await run.push(lease, 0)).HasField("watermark")
            return

        async def is_durable() -> bool:
            return (await run.push(lease, 0)).watermark.durable_position >= first.position

        await until(is_durable)
        mark = (await run.push(lease, 0)).watermark
        joined = await run.world.join("n1", max_concurrent_tasks=1)
        assert (mark.durability, mark.data_incarnation) == (FSYNCED, joined.data_incarnation)
        async with working(run.world) as session:
            assert (await soon(session.watermarks)).durable_position >= first.position


async def test_what_the_watermark_passed_survives_and_the_rest_is_taken_again_once(
    own_valkey: ValkeyServer, tmp_path: Path
) -> None:
    if not await has_waitaof(own_valkey.url):
        pytest.skip("this Redis cannot say what is on its disk; the test with appendfsync always covers it")
    async with running(own_valkey, tmp_path) as run:
        leases = await run.node.lease(4)
        await run.node.complete_all(leases[:2])

        async def all_durable() -> bool:
            return (await run.push(leases[0], 0)).watermark.durable_position >= 4

        await until(all_durable)
        disk_has = own_valkey.log_bytes
        await run.node.complete_all(leases[2:])
        await lose_power(own_valkey, disk_has=disk_has)
        answers = [await run.push(lease, member) for lease in leases for member in (0, 1)]
        outcomes = [answer.result.outcome for answer in answers]
        assert outcomes == [OUTCOME_DUPLICATE] * 4 + [OUTCOME_ACCEPTED] * 4
        await run.world.has_account(ingested=8, ready=8)


@pytest.mark.timeout(90)
async def test_acknowledged_as_fsynced_is_on_disk_for_nodes_and_trainers_alike(
    safe_valkey: ValkeyServer, tmp_path: Path
) -> None:
    async with running(safe_valkey, tmp_path, durability="fsynced") as run:
        (lease,) = await run.node.lease()
        answers = [await run.push(lease, member) for member in (0, 1)]
        assert [answer.result.durability for answer in answers] == [FSYNCED, FSYNCED]
        batch = await run.trainer.train(1, base_version=0)
        disk_has = safe_valkey.log_bytes
        (lost,) = await run.node.lease()
        await lose_power(safe_valkey, disk_has=disk_has)
        assert (await answered(lambda: run.trainer.acquire(1))).batch.batch_id == batch.batch_id
        assert await run.trainer.ack(batch, TRAINED) == TRAINED
        assert (await run.trainer.claim()).version == 1
        await run.world.has_account(trained=2)
        assert lost.task.task_id != lease.task.task_id


@pytest.mark.timeout(90)
async def test_under_everysec_an_ack_waits_for_the_disk(own_valkey: ValkeyServer, tmp_path: Path) -> None:
    if not await has_waitaof(own_valkey.url):
        with pytest.raises(IncompatibleError, match=r"appendfsync always.*--durability memory"):
            async with served(own_valkey.url, tmp_path, durability="fsynced"):
                pass
        return
    async with running(own_valkey, tmp_path, durability="fsynced") as run:
        (lease,) = await run.node.lease()
        answers = await asyncio.gather(*(run.push(lease, member) for member in (0, 1)))
        disk_has = own_valkey.log_bytes
        assert [answer.result.durability for answer in answers] == [FSYNCED, FSYNCED]
        await lose_power(own_valkey, disk_has=disk_has)
        for member in (0, 1):
            assert (await run.push(lease, member)).result.outcome == OUTCOME_DUPLICATE


async def test_a_redis_that_cannot_give_the_level_is_refused_with_the_remedy(
    redis_binary: str, tmp_path: Path
) -> None:
    with ValkeyServer(tmp_path / "lazy", binary=redis_binary, options=["--appendfsync", "no"]) as server:
        remedies = {"fsynced": "set appendonly yes and appendfsync always", "replicated": "attach"}
        for level, remedy in remedies.items():
            with pytest.raises(IncompatibleError, match=remedy):
                async with served(server.url, tmp_path, durability=level):
                    pass
        async with served(server.url, tmp_path):
            pass


@pytest.mark.timeout(90)
async def test_acknowledged_as_replicated_is_on_the_replica(
    own_valkey: ValkeyServer, redis_binary: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--replicaof", "127.0.0.1", str(own_valkey.port), "--repl-diskless-sync-delay", "0"]
    with ValkeyServer(tmp_path / "replica", binary=redis_binary, options=options) as replica:
        async with Connection(own_valkey.url) as connection:

            async def attached() -> bool:
                return "state=online" in str(await connection.raw("INFO", "replication"))

            await until(attached)
        async with running(own_valkey, tmp_path, durability="replicated") as run:
            (lease,) = await run.node.lease()
            episodes = [run.node.episode(lease, member) for member in (0, 1)]
            assert (await run.node.push(episodes[0])).durability == REPLICATED
            copy = Connection(replica.url, allow_volatile=True)
            held = await copy.raw("HGET", f"af:{{run}}:task:{lease.task.task_id}", "m0")
            await copy.close()
            assert held == b"f" + episodes[0].episode_id.encode()
            monkeypatch.setattr(durability, "BARRIER_S", 0.5)
            replica.kill()
            with pytest.raises(UnavailableError, match="not replicated within"):
                await run.node.push(episodes[1])


async def test_a_redis_that_lost_writes_without_a_restart_gets_another_identity(world: World) -> None:
    """As after a failover behind one address: the process looks the same, its data is older."""
    _, node = await world.started(dataset="Counting", groups_per_step=4)
    connection = world.dataflow.connection
    disk = world.dataflow.durability._disk(connection.home("run"))
    before = await connection.data_incarnation()
    first, second = await node.lease(2)
    await node.complete(first)

    async def seen() -> bool:
        return disk._highest.get("run", 0) >= 2 and bool(disk._incarnation)

    await until(seen)
    async with working(world) as session:
        await session.credits(0)
        await world.until(lambda status: status.nodes[0].connected)
        await connection.raw("HSET", "af:{run}:run", "position", 0)
        await node.push(node.episode(second, 0))

        async def replaced() -> bool:
            return await connection.data_incarnation() != before

        await until(replaced)
        assert (await session.call.code()).name == "UNAVAILABLE"


@pytest.mark.timeout(90)
async def test_a_lost_claim_is_never_given_to_another_trainer(
    safe_valkey: ValkeyServer, tmp_path: Path
) -> None:
    async with running(safe_valkey, tmp_path) as run:
        zombie, other = run.trainer, await run.world.trainer()
        disk_has = safe_valkey.log_bytes
        await zombie.claim()
        await lose_power(safe_valkey, disk_has=disk_has)
        await answered(other.claim)
        assert other.epoch > zombie.epoch
        with pytest.raises(FencedError):
            await zombie.acquire(1)
        await run.node.work()
        assert (await other.acquire(1)).batch.items


@pytest.mark.timeout(90)
async def test_lost_announcements_are_taken_again_in_order_and_a_gap_names_the_newest(
    safe_valkey: ValkeyServer, tmp_path: Path
) -> None:
    async with running(safe_valkey, tmp_path) as run:
        trainer = run.trainer
        await run.node.work(3)
        await trainer.train(1, base_version=0)
        for step in (2, 3):
            await trainer.ack((await trainer.acquire(step, base_version=1)).batch, TRAINED)
        disk_has = safe_valkey.log_bytes
        await trainer.publish(version=2, step=2)
        await trainer.publish(version=3, step=3)
        await lose_power(safe_valkey, disk_has=disk_has)
        with pytest.raises(VersionGapError) as refused:
            await answered(lambda: trainer.publish(version=3, step=3))
        assert refused.value.metadata["newest_version"] == "1"
        for version, step in [(2, 2), (3, 3), (2, 2)]:
            assert (await trainer.publish(version=version, step=step)).version == version
