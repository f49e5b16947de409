"""Durability: what was acknowledged as safe survives a power loss, and what was not is pushed again once.

A power loss is a SIGKILL of Redis and an append-only file cut to what the disk had: killing alone keeps the page cache.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from astraflow.dataflow.v1 import batch_service_pb2, durability_pb2, trajectory_service_pb2
from astraflow.errors import FencedError, IncompatibleError, UnavailableError, VersionGapError
from astraflow_dataflow.store import durability
from astraflow_dataflow.store.connection import Connection
from support.dataflow_world import World, answered, served, until
from support.valkey import ValkeyServer
from support.work_stream import soon, working

FSYNCED, REPLICATED = durability_pb2.DURABILITY_FSYNCED, durability_pb2.DURABILITY_REPLICATED
TRAINED = batch_service_pb2.BATCH_STAGE_TRAINED
Outcome = trajectory_service_pb2.Outcome


@pytest.fixture
def safe_valkey(redis_binary: str, tmp_path: Path) -> Iterator[ValkeyServer]:
    """A server of this test alone that can say what is on its disk, whatever its release."""
    server = ValkeyServer(tmp_path / "safe", binary=redis_binary, options=["--appendfsync", "always"])
    server.start()
    yield server
    server.kill()


async def has_waitaof(url: str) -> bool:
    """Whether this release can say what is on its disk under everysec."""
    async with Connection(url) as connection:
        return (await connection.durability()).has_waitaof


async def lose_power(server: ValkeyServer, *, disk_has: int) -> None:
    """Kill, keep what the disk had, start again."""
    server.kill()
    assert server.log_bytes >= disk_has
    server.truncate_log(disk_has)
    await asyncio.to_thread(server.start)


@asynccontextmanager
async def running(server: ValkeyServer, folder: Path, **settings: object) -> AsyncIterator[World]:
    """A run of one-group steps with a trainer and a node."""
    async with served(server.url, folder, **settings) as world:
        await world.started(dataset="Counting", groups_per_step=1, max_staleness=8)
        yield world


async def test_positions_rise_by_one_and_a_repeated_push_has_no_new_one(world: World) -> None:
    _, node = await world.started(dataset="Counting")
    (lease,) = await node.lease()
    first, second = (
        await node.push_reply(node.episode(lease, 0)),
        await node.push_reply(node.episode(lease, 1)),
    )
    repeated = await node.push_reply(node.episode(lease, 0))
    positions = [answer.result.position for answer in (first, second, repeated)]
    assert positions == [1, 2, 2]


async def test_the_watermark_follows_the_commits_as_far_as_redis_can_tell(
    own_valkey: ValkeyServer, tmp_path: Path
) -> None:
    async with running(own_valkey, tmp_path) as world:
        node = await world.node()
        (lease,) = await node.lease()
        first = await node.push_reply(node.episode(lease, 0))
        assert first.result.durability == durability_pb2.DURABILITY_MEMORY
        if not await has_waitaof(own_valkey.url):
            await asyncio.sleep(0.2)
            assert not (await node.push_reply(node.episode(lease, 0))).HasField("watermark")
            return

        async def is_durable() -> bool:
            answer = await node.push_reply(node.episode(lease, 0))
            return answer.watermark.durable_position >= first.result.position

        await until(is_durable)
        mark = (await node.push_reply(node.episode(lease, 0))).watermark
        joined = await world.join("n1", incarnation=1, max_concurrent_tasks=1)
        assert (mark.durability, mark.data_incarnation) == (FSYNCED, joined.data_incarnation)
        async with working(world) as session:
            told = await soon(session.watermarks)
            assert told.durable_position >= first.result.position


async def test_what_the_watermark_passed_survives_and_the_rest_is_taken_again_once(
    own_valkey: ValkeyServer, tmp_path: Path
) -> None:
    if not await has_waitaof(own_valkey.url):
        pytest.skip("this Redis cannot say what is on its disk; the test with appendfsync always covers it")
    async with running(own_valkey, tmp_path) as world:
        node = await world.node()
        leases = await node.lease(4)
        for lease in leases[:2]:
            await node.complete(lease)

        async def all_durable() -> bool:
            return (await node.push_reply(node.episode(leases[0], 0))).watermark.durable_position >= 4

        await until(all_durable)
        disk_has = own_valkey.log_bytes
        for lease in leases[2:]:
            await node.complete(lease)
        await lose_power(own_valkey, disk_has=disk_has)
        outcomes = []
        for lease in leases:
            for member in (0, 1):
                answer = await answered(
                    lambda lease=lease, member=member: node.push_reply(node.episode(lease, member))
                )  # type: ignore[misc]
                outcomes.append(Outcome.Name(answer.result.outcome))
        assert outcomes == ["OUTCOME_DUPLICATE"] * 4 + ["OUTCOME_ACCEPTED"] * 4
        await world.has_account(ingested=8, ready=8)


@pytest.mark.timeout(90)
async def test_acknowledged_as_fsynced_is_on_disk_for_nodes_and_trainers_alike(
    safe_valkey: ValkeyServer, tmp_path: Path
) -> None:
    async with running(safe_valkey, tmp_path, durability="fsynced") as world:
        node, trainer = await world.node(), await world.trainer()
        (lease,) = await node.lease()
        answers = [await node.push_reply(node.episode(lease, member)) for member in (0, 1)]
        assert [answer.result.durability for answer in answers] == [FSYNCED, FSYNCED]
        batch = await trainer.train(1, base_version=0)
        disk_has = safe_valkey.log_bytes
        (lost,) = await node.lease()
        await lose_power(safe_valkey, disk_has=disk_has)
        assert (await answered(lambda: trainer.acquire(1))).batch.batch_id == batch.batch_id
        assert await trainer.ack(batch, TRAINED) == TRAINED
        assert (await trainer.claim()).version == 1
        await world.has_account(trained=2)
        assert lost.task.task_id != lease.task.task_id


@pytest.mark.timeout(90)
async def test_under_everysec_an_ack_waits_for_the_disk(own_valkey: ValkeyServer, tmp_path: Path) -> None:
    if not await has_waitaof(own_valkey.url):
        with pytest.raises(IncompatibleError, match=r"appendfsync always.*--durability memory"):
            async with served(own_valkey.url, tmp_path, durability="fsynced"):
                pass
        return
    async with running(own_valkey, tmp_path, durability="fsynced") as world:
        node = await world.node()
        (lease,) = await node.lease()
        answers = await asyncio.gather(*(node.push_reply(node.episode(lease, member)) for member in (0, 1)))
        disk_has = own_valkey.log_bytes
        assert [answer.result.durability for answer in answers] == [FSYNCED, FSYNCED]
        await lose_power(own_valkey, disk_has=disk_has)
        for member in (0, 1):
            answer = await answered(lambda member=member: node.push_reply(node.episode(lease, member)))  # type: ignore[misc]
            assert answer.result.outcome == trajectory_service_pb2.OUTCOME_DUPLICATE


async def test_a_redis_that_cannot_give_the_level_is_refused_with_the_remedy(
    redis_binary: str, tmp_path: Path
) -> None:
    server = ValkeyServer(tmp_path / "lazy", binary=redis_binary, options=["--appendfsync", "no"])
    server.start()
    try:
        for level, remedy in [
            ("fsynced", "set appendonly yes and appendfsync always"),
            ("replicated", "attach"),
        ]:
            with pytest.raises(IncompatibleError, match=remedy):
                async with served(server.url, tmp_path, durability=level):
                    pass
        async with served(server.url, tmp_path):
            pass
    finally:
        server.kill()


@pytest.mark.timeout(90)
async def test_acknowledged_as_replicated_is_on_the_replica(
    own_valkey: ValkeyServer, redis_binary: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = ValkeyServer(
        tmp_path / "replica",
        binary=redis_binary,
        options=["--replicaof", "127.0.0.1", str(own_valkey.port), "--repl-diskless-sync-delay", "0"],
    )
    replica.start()
    try:
        async with Connection(own_valkey.url) as connection:

            async def attached() -> bool:
                info = str(await connection.raw("INFO", "replication"))
                return "state=online" in info

            await until(attached, within_s=60)
        async with running(own_valkey, tmp_path, durability="replicated") as world:
            node = await world.node()
            (lease,) = await node.lease()
            answer = await node.push_reply(node.episode(lease, 0))
            assert answer.result.durability == REPLICATED
            copy = Connection(replica.url, allow_volatile=True)
            held = await copy.raw("HGET", f"af:{{run}}:task:{lease.task.task_id}", "m0")
            await copy.close()
            assert held == b"f" + node.episode(lease, 0).episode_id.encode()
            monkeypatch.setattr(durability, "BARRIER_S", 0.5)
            replica.kill()
            with pytest.raises(UnavailableError, match="not replicated within"):
                await node.push_reply(node.episode(lease, 1))
    finally:
        replica.kill()


async def test_a_redis_that_lost_writes_without_a_restart_gets_another_identity(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a failover behind one address: the process looks the same, its data is older."""
    await world.create_run(dataset="Counting", groups_per_step=4)
    await world.trainer()
    node, connection = await world.node(), world.dataflow.connection
    before = await connection.data_incarnation()
    first, second = await node.lease(2)
    await node.complete(first)

    follower = world.dataflow.durability

    async def seen() -> bool:
        return follower._highest.get("run", 0) >= 2 and bool(follower._incarnation)

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
    async with running(safe_valkey, tmp_path) as world:
        zombie, other = await world.trainer(), await world.trainer()
        disk_has = safe_valkey.log_bytes
        await zombie.claim()
        await lose_power(safe_valkey, disk_has=disk_has)
        await answered(other.claim)
        assert other.epoch > zombie.epoch
        with pytest.raises(FencedError):
            await zombie.acquire(1)
        node = await world.node()
        await node.work()
        assert (await other.acquire(1)).batch.items


@pytest.mark.timeout(90)
async def test_lost_announcements_are_taken_again_in_order_and_a_gap_names_the_newest(
    safe_valkey: ValkeyServer, tmp_path: Path
) -> None:
    async with running(safe_valkey, tmp_path) as world:
        node, trainer = await world.node(), await world.trainer()
        await node.work(3)
        await trainer.train(1, base_version=0)
        await trainer.ack((await trainer.acquire(2, base_version=1)).batch, TRAINED)
        await trainer.ack((await trainer.acquire(3, base_version=1)).batch, TRAINED)
        disk_has = safe_valkey.log_bytes
        await trainer.publish(version=2, step=2)
        await trainer.publish(version=3, step=3)
        await lose_power(safe_valkey, disk_has=disk_has)
        with pytest.raises(VersionGapError) as refused:
            await answered(lambda: trainer.publish(version=3, step=3))
        assert refused.value.metadata["newest_version"] == "1"
        for version, step in [(2, 2), (3, 3), (2, 2)]:
            assert (await trainer.publish(version=version, step=step)).version == version
