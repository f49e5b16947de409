"""Payloads outside the server's Redis: on a second Redis, or in an object store. What is promised stays promised."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
import redis

from astraflow.dataflow.v1.batch_service_pb2 import VOID_ACTION_DISCARD
from astraflow.dataflow.v1.run_service_pb2 import DeleteRunResponse
from astraflow.errors import IncompatibleError, PayloadMissingError, UnavailableError
from astraflow_dataflow.server import check
from astraflow_dataflow.settings import DataflowServerSettings
from astraflow_dataflow.store.keys import Keys
from astraflow_dataflow.store.payloads.packs import AWAY, LOST
from astraflow_dataflow.store.replies import as_texts
from astraflow_kit.failpoints import read_hits
from support.dataflow_process import DataflowProcess
from support.dataflow_world import Trainer, World, answered, served, until, until_equal
from support.s3_server import S3Server
from support.valkey import ValkeyServer

LONG = {"overrides": ["policies.solver.sampling.max_new_tokens=2048"]}
_READ: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "packs": (("HKEYS",), ()),
    "packs_ending": (("ZRANGE",), (0, -1)),
    "packs_ended": (("SMEMBERS",), ()),
}


@pytest.fixture
def other(redis_binary: str, tmp_path: Path) -> Iterator[ValkeyServer]:
    """A second server, for payloads."""
    with ValkeyServer(tmp_path / "other", binary=redis_binary) as server:
        yield server


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3-compatible store."""
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(params=["redis", "file", pytest.param("s3", marks=pytest.mark.ci)])
def outside(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, object]:
    """Settings that say where the payloads are."""
    if request.param == "redis":
        return {"payloads": request.getfixturevalue("other").url}
    if request.param == "file":
        return {"payloads": f"file://{tmp_path}/payloads"}
    s3: S3Server = request.getfixturevalue("s3")
    bucket = f"payloads-{uuid4().hex}"
    s3.client().create_bucket(Bucket=bucket)
    return {
        "payloads": f"s3://{bucket}/runs",
        "store_endpoint_url": s3.url,
        "store_credentials_file": s3.credentials_file,
        "store_region": "us-east-1",
    }


@pytest.fixture
async def apart(redis_url: str, outside: dict[str, object], tmp_path: Path) -> AsyncIterator[World]:
    """A server whose payloads are outside."""
    async with served(redis_url, tmp_path, **outside) as world:
        yield world


@pytest.fixture
async def over_two(redis_url: str, other: ValkeyServer, tmp_path: Path) -> AsyncIterator[World]:
    """A server whose payloads are on the second Redis."""
    async with served(redis_url, tmp_path, payloads=other.url) as world:
        yield world


async def packs(world: World, kind: str = "packs") -> list[str]:
    """Packs that are needed, or that end."""
    names, bounds = _READ[kind]
    return as_texts(await world.dataflow.connection.raw(*names, Keys("run").of(kind), *bounds))


async def are_there(world: World, names: list[str]) -> list[bool]:
    """Whether packs are outside."""
    holder = world.dataflow.store.payloads.holder
    assert holder is not None
    return [await holder.get("run", name, start=0, length=1) is not None for name in names]


async def end_now(world: World) -> int:
    """Remove what ends, as if its time were over."""
    for name in await packs(world, "packs_ending"):
        await world.dataflow.connection.raw("ZADD", Keys("run").of("packs_ending"), 0, name)
    return await world.dataflow.store.payloads.remove_ended("run")


async def bodies(trainer: Trainer, step: int) -> dict[str, bytes]:
    """The payloads of a batch."""
    return {reply.trajectory_id: reply.body for reply in await trainer.fetch(step)}


async def train(trainer: Trainer) -> None:
    """Train on the first batch, and make it durable."""
    await trainer.train(1, base_version=0)
    await trainer.mark_durable(1)


async def test_payloads_are_stored_read_and_removed_outside(apart: World) -> None:
    trainer, node = await apart.started(dataset="Counting")
    episodes = [node.episode(lease, member) for lease in await node.lease(2) for member in lease.members]
    await node.pack(*episodes)
    await trainer.acquire(1)
    pushed = [item for episode in episodes for item in episode.trajectories]
    assert await bodies(trainer, 1) == {item.header.trajectory_id: item.body for item in pushed}
    names = as_texts(await apart.dataflow.connection.raw("KEYS", "*"))
    assert not [name for name in names if ":payload:" in name]
    (stored,) = await packs(apart)
    await train(trainer)
    await until_equal(lambda: packs(apart), [])
    assert await are_there(apart, [stored]) == [True]  # whoever read where they are has a minute to read them
    assert await end_now(apart) == 1
    assert await are_there(apart, [stored]) == [False]
    assert await packs(apart, "packs_ended") == []
    await apart.has_account(ingested=4, trained=4)


async def test_redis_holds_a_place_instead_of_the_payload(apart: World) -> None:
    _, node = await apart.started("t1", "t2", group_size=8, **LONG)
    connection, held = apart.dataflow.connection, []
    for lease in await node.lease(2):
        await node.pack(*(node.episode(lease, member, num_response=2048) for member in lease.members))
        await until_equal(lambda: apart.dataflow.store.episodes.unsettled("run", least_age_s=0, limit=9), [])
        held.append(int((await connection.figures())["used_memory"]))
    assert held[1] - held[0] < 8 * 4096  # of 8 · 16.7 kB


async def test_of_a_pack_goes_what_was_refused_and_stays_what_was_not(apart: World) -> None:
    _, node = await apart.started("t1", "t2")
    (first, second) = await node.lease(2)
    await node.pack(node.episode(first, 0, reward=0.0), node.episode(second, 0))
    (stored,) = await packs(apart)
    twice = node.episode(first, 0, episode_id="another")
    assert await node.outcome(twice) == "SUPERSEDED"
    assert await node.outcome(node.episode(first, 0, reward=0.0)) == "DUPLICATE"
    assert await packs(apart) == [stored]
    assert await end_now(apart) == 2  # what the two that were not accepted brought
    assert await are_there(apart, [stored]) == [True]
    await apart.has_account(ingested=3, assembling=2, dropped={"superseded": 1})


async def test_a_commit_that_comes_after_its_payloads_went_must_be_repeated(
    apart: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, node = await apart.started("t1")
    (lease,) = await node.lease()
    payloads, episode = apart.dataflow.store.payloads, node.episode(lease, 0)
    write = payloads.write

    async def late(run_id: str, stored: list[bytes]) -> str:
        packed = await write(run_id, stored)
        assert await end_now(apart) == 1
        return packed

    with monkeypatch.context() as patched:
        patched.setattr(payloads, "write", late)
        with pytest.raises(PayloadMissingError):
            await node.push(episode)
    assert await node.outcome(episode) == "ACCEPTED"
    await apart.has_account(ingested=1, assembling=1)


async def test_a_deleted_run_leaves_nothing_outside(apart: World) -> None:
    await apart.bound()
    names = [name for kind in _READ for name in await packs(apart, kind)]
    assert any(await are_there(apart, names))
    await apart.ask(DeleteRunResponse, force=True)
    assert not any(await are_there(apart, names))
    assert [
        name for name in as_texts(await apart.dataflow.connection.raw("KEYS", "*")) if "{run}" in name
    ] == []


async def test_the_archive_reads_what_is_outside(apart: World) -> None:
    pytest.importorskip("pyarrow")
    _, node = await apart.started("t1", archive="{}", store_uri=f"file://{apart.dataflow.settings.work_dir}")
    (lease,) = await node.lease()
    first, second = node.episode(lease, 0), node.episode(lease, 0, episode_id="late")
    await node.pack(first, second)
    entries = await apart.dataflow.store.archive.pack(
        "run", server="test", lease_s=10, least_age_s=0, pack_bytes=1
    )
    (entry,) = entries
    assert await apart.dataflow.store.archive.bodies("run", entry) == [second.trajectories[0].body]
    assert await apart.dataflow.store.archive.written("run", entries, num_bytes=1) == 1
    assert len(await packs(apart)) == 1  # that of the accepted one, which came in the same message


@pytest.mark.slow
@pytest.mark.timeout(90)
async def test_a_server_killed_between_payloads_and_commit_loses_nothing_and_leaves_nothing(
    process: DataflowProcess, redis_url: str, other: ValkeyServer, tmp_path: Path
) -> None:
    process.start(failpoints="dataflow.payloads_stored=kill", options=["--payloads", other.url])
    async with process.world() as world:
        _, node = await world.started("t1")
        (lease,) = await node.lease()
        with pytest.raises(UnavailableError):
            await node.push(node.episode(lease, 0))
    process.wait_until_ended()
    assert [hit.name for hit in read_hits(process.failpoints_log)] == ["dataflow.payloads_stored"]
    async with served(redis_url, tmp_path, payloads=other.url) as world:
        world.run_id = "run"
        (orphan,) = await packs(world, "packs_ending")
        assert await are_there(world, [orphan]) == [True]
        node = replace(node, world=world)
        assert await node.complete(lease) == ["ACCEPTED", "ACCEPTED"]
        assert await end_now(world) == 1
        assert await are_there(world, [orphan]) == [False]
        await world.has_account(ingested=2)


async def test_while_the_payloads_redis_is_away_nodes_keep_what_they_have_and_why_says_so(
    over_two: World, other: ValkeyServer
) -> None:
    trainer, node = await over_two.started(dataset="Counting")
    with redis.Redis(port=other.port) as own:
        own.config_set("appendfsync", "no")  # with it a busy disk may hold back what a kill then loses
    leases = await node.lease(2)
    await node.complete(leases[0])
    other.kill()
    with pytest.raises(UnavailableError):
        await node.push(node.episode(leases[1], 0))
    assert (await over_two.waits())[AWAY].released_by.startswith("start it again")
    other.start()
    await answered(lambda: node.complete(leases[1]))
    await over_two.dataflow.store.payloads.look(["run"])
    assert not {AWAY, LOST} & set(await over_two.waits())
    await trainer.acquire(1)
    assert len(await answered(lambda: bodies(trainer, 1))) == 4
    await over_two.has_account(ingested=4, in_batch=4)


async def test_what_the_payloads_redis_lost_comes_again_from_the_nodes(
    over_two: World, other: ValkeyServer
) -> None:
    trainer, node = await over_two.started(dataset="Counting")
    episodes = [node.episode(lease, member) for lease in await node.lease(2) for member in lease.members]
    await node.pack(*episodes)
    await trainer.acquire(1)
    connection = over_two.dataflow.connection
    before = await connection.data_incarnation()
    other.kill()
    other.truncate_log(0)
    other.start()
    payloads = over_two.dataflow.store.payloads

    async def seen() -> bool:
        if incarnation := await payloads.look(["run"]):
            await over_two.dataflow.durability.see_payloads(incarnation)
        return bool(incarnation)

    await until(seen)
    assert await connection.data_incarnation() != before  # by which nodes know that they must push again
    assert LOST in await over_two.waits()
    with pytest.raises(UnavailableError, match="VoidBatch") as refused:
        await bodies(trainer, 1)
    assert refused.value.metadata["reason"] == LOST
    assert {await node.outcome(episode) for episode in episodes} == {"DUPLICATE"}
    assert len(await bodies(trainer, 1)) == 4
    await payloads.look(["run"])
    assert LOST not in await over_two.waits()
    await train(trainer)
    await until_equal(lambda: packs(over_two), [])
    await over_two.has_account(ingested=4, trained=4)


async def test_a_batch_whose_payloads_are_gone_for_good_can_be_voided(
    over_two: World, other: ValkeyServer
) -> None:
    trainer, _, batch = await over_two.bound()
    other.kill()
    other.truncate_log(0)
    other.start()
    with pytest.raises(UnavailableError, match="gone"):
        await answered_by_loss(trainer)
    await over_two.void(batch, VOID_ACTION_DISCARD)
    await over_two.dataflow.store.payloads.look(["run"])
    assert LOST not in await over_two.waits()
    await over_two.has_account(ingested=4, dropped={"voided": 4})


async def answered_by_loss(trainer: Trainer) -> None:
    """Fetch until the Redis answers, and says that it has nothing."""
    while True:
        try:
            await bodies(trainer, 1)
        except UnavailableError as error:
            if error.metadata.get("reason") == LOST:
                raise


async def test_a_server_without_the_address_refuses_a_redis_whose_payloads_are_elsewhere(
    redis_url: str, other: ValkeyServer, tmp_path: Path
) -> None:
    async with served(redis_url, tmp_path, payloads=other.url) as world:
        await world.bound()
    with pytest.raises(IncompatibleError, match="payloads of run run are outside"):
        async with served(redis_url, tmp_path):
            pass
    settings = DataflowServerSettings(redis=redis_url, payloads=other.url)
    assert (await check(settings))["payloads"] == f"usable, at {other.url}"


async def test_payloads_from_before_the_setting_stay_where_they_are(
    redis_url: str, other: ValkeyServer, tmp_path: Path
) -> None:
    async with served(redis_url, tmp_path) as world:
        await world.started(dataset="Counting")
        node = await world.node()
        await node.make_ready(1)
        known = world.nodes
    async with served(redis_url, tmp_path, payloads=other.url) as world:
        world.run_id, world.nodes = "run", known
        trainer, node = await world.trainer(publish_first=False), await world.node()
        await node.make_ready(1)
        await trainer.acquire(1)
        assert len(await bodies(trainer, 1)) == 4
        await train(trainer)
        assert await packs(world) == []
        await world.has_account(ingested=4, trained=4)
