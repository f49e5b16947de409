"""A Redis that would lose data, or cannot be used, is refused with remedy and status; a full one is outlived."""

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path

import pytest
import redis

from astraflow.dataflow.v1 import batch_service_pb2
from astraflow.errors import AstraflowError
from astraflow_dataflow.store import function_library
from astraflow_dataflow.store.connection import Connection
from astraflow_dataflow.store.homes.cluster import redis_at
from astraflow_dataflow.store.keys import READ_AS_IT_IS, SCHEMA_VERSION
from astraflow_dataflow.store.replies import as_int
from astraflow_kit.lifecycle import ExitCode
from support.dataflow_world import served
from support.fake_redis import fake_redis
from support.valkey import ValkeyServer
from support.valkey_cluster import ValkeyNode

pytestmark = [pytest.mark.integration, pytest.mark.slow]

TRAINED = batch_service_pb2.BATCH_STAGE_TRAINED
Spoil = Callable[[ValkeyServer], AbstractAsyncContextManager[str]]


def after(*commands: tuple[str | int, ...]) -> Spoil:
    """The server after some commands, at its own address."""

    @asynccontextmanager
    async def spoil(server: ValkeyServer) -> AsyncIterator[str]:
        async with Connection(server.url) as connection:
            for words in commands:
                await connection.raw(*words)
        yield server.url

    return spoil


@asynccontextmanager
async def cluster_node(server: ValkeyServer) -> AsyncIterator[str]:
    """A server in cluster mode."""
    with ValkeyNode(server.folder / "cluster") as node:
        yield node.url


@asynccontextmanager
async def part_of_a_cluster(server: ValkeyServer) -> AsyncIterator[str]:
    """A cluster that has some of the slots."""
    with ValkeyNode(server.folder / "cluster") as node:
        node.ask("CLUSTER", "ADDSLOTSRANGE", 0, 8191, 8193, 16382)
        yield f"redis+cluster://127.0.0.1:1,127.0.0.1:{node.port}"


@asynccontextmanager
async def as_a_cluster(server: ValkeyServer) -> AsyncIterator[str]:
    """A server that is alone, asked for as a cluster."""
    yield f"redis+cluster://127.0.0.1:{server.port}"


OLD = {"redis_version": "6.2.14", "maxmemory_policy": "noeviction", "aof_enabled": "1"}
NOWHERE = "redis://user:secret@127.0.0.1:1/0"


FORGET = (("FLUSHALL",), ("FUNCTION", "FLUSH"))

# What is wrong, the words that must be said, and the status of `astraflow dataflow` and its --check.
ROWS: dict[str, tuple[Spoil, tuple[str, ...], ExitCode]] = {
    "evicts": (
        after(("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")),
        ("evicts keys (maxmemory-policy allkeys-lru)", "set maxmemory-policy noeviction"),
        ExitCode.SUPERSEDED,
    ),
    "keeps nothing": (
        after(("CONFIG", "SET", "appendonly", "no")),
        ("keeps no append-only file", "set appendonly yes", "--allow-volatile"),
        ExitCode.SUPERSEDED,
    ),
    "too old": (
        lambda _: fake_redis(OLD),
        ("Redis 6.2.14 at redis://127.0.0.1:", "is too old; install 7.0 or newer"),
        ExitCode.SUPERSEDED,
    ),
    "is a node of a cluster": (
        cluster_node,
        ("is a node of a cluster", "redis+cluster://HOST:PORT,HOST:PORT"),
        ExitCode.SUPERSEDED,
    ),
    "is no node of a cluster": (
        as_a_cluster,
        ("is no node of a cluster", "give its address as redis://HOST:PORT/DB"),
        ExitCode.SUPERSEDED,
    ),
    "is a cluster with slots that nobody has": (
        part_of_a_cluster,
        ("nobody has the slots 8192, 16383", "CLUSTER ADDSLOTSRANGE", "bring the one that has them back"),
        ExitCode.SUPERSEDED,
    ),
    "is a cluster that is not there": (
        lambda _: nullcontext("redis+cluster://user:secret@127.0.0.1:1,127.0.0.1:2"),
        ("no usable node of a Redis cluster at redis+cluster://127.0.0.1:1,127.0.0.1:2", "start one"),
        ExitCode.UNAVAILABLE,
    ),
    "written by a later release": (
        after(("SET", "af:schema", 999)),
        ("schema version 999", "a later release", "give another Redis database"),
        ExitCode.SUPERSEDED,
    ),
    "written by an earlier release": (
        after(("SET", "af:schema", 5)),
        ("schema version 5", "astraflow 0.1.0 (commit da6278bf3107) reads it: go on with that one"),
        ExitCode.SUPERSEDED,
    ),
    "wants a password": (
        after(("CONFIG", "SET", "requirepass", "secret")),
        ("Redis refuses this user", "give redis://USER@HOST:PORT/DB", "--redis-password-file"),
        ExitCode.SUPERSEDED,
    ),
    "is a replica": (
        after(*FORGET, ("REPLICAOF", "127.0.0.1", 1)),
        ("read-only replica", "give the address of its primary"),
        ExitCode.UNAVAILABLE,
    ),
    "is not there": (
        lambda _: nullcontext(NOWHERE),
        ("no usable Redis at redis://127.0.0.1:1/0", "start one, or give another --redis"),
        ExitCode.UNAVAILABLE,
    ),
    "is full before it holds anything": (
        after(*FORGET, ("CONFIG", "SET", "maxmemory", 1)),
        ("Redis is full (maxmemory)", "give it more memory"),
        ExitCode.UNAVAILABLE,
    ),
}


async def server_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`astraflow dataflow` run to its end."""
    command = [sys.executable, "-m", "astraflow_dataflow", *arguments]
    return await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=90, check=False
    )


@pytest.mark.parametrize("row", ROWS)
async def test_a_redis_that_cannot_hold_the_data_is_refused(own_valkey: ValkeyServer, row: str) -> None:
    spoil, words, status = ROWS[row]
    async with spoil(own_valkey) as url:
        with pytest.raises(AstraflowError) as refused:
            async with redis_at(url):
                pass
        ended = await server_command("--redis", url, "--check")
    assert [word for word in words if word not in refused.value.message] == [], refused.value.message
    assert ended.returncode == status, ended.stderr
    assert [word for word in words if word not in ended.stderr] == []
    assert "secret" not in ended.stderr


@pytest.mark.parametrize("found", READ_AS_IT_IS)
async def test_data_of_an_earlier_schema_that_is_read_as_it_is_becomes_data_of_this_one(
    own_valkey: ValkeyServer, found: int
) -> None:
    async with after(("SET", "af:schema", found))(own_valkey) as url, Connection(url) as connection:
        assert as_int(await connection.raw("GET", "af:schema")) == SCHEMA_VERSION


@pytest.mark.parametrize("row", ["evicts", "is not there"])
async def test_the_server_itself_ends_with_the_status_of_its_check(
    own_valkey: ValkeyServer, row: str
) -> None:
    spoil, words, status = ROWS[row]
    async with spoil(own_valkey) as url:
        ended = await server_command("--redis", url)
    assert ended.returncode == status
    assert [word for word in words if word not in ended.stderr] == []


async def test_a_redis_that_keeps_nothing_is_used_where_that_is_accepted(own_valkey: ValkeyServer) -> None:
    spoil = ROWS["keeps nothing"][0]
    async with spoil(own_valkey) as url, Connection(url, allow_volatile=True) as connection:
        assert await connection.ready() is None


def test_every_command_that_functions_call_is_known(redis_url: str) -> None:
    called = sorted(set(re.findall(r"\bcall\('(\w+)'", function_library.source())))
    assert len(called) > 40
    with redis.Redis.from_url(redis_url) as client:
        described = client.execute_command("COMMAND INFO", *called)
    assert [name for name, known in zip(called, described, strict=True) if not known] == []


async def test_a_password_comes_from_a_file_and_may_change(own_valkey: ValkeyServer, tmp_path: Path) -> None:
    password_file, user_url = tmp_path / "password", own_valkey.url.replace("//", "//default@")
    async with Connection(own_valkey.url) as administrator:
        for password, url in (("first", own_valkey.url), ("second", user_url)):
            password_file.write_text(f"{password}\n")
            await administrator.raw("CONFIG", "SET", "requirepass", password)
            async with Connection(url, password_file=password_file) as connection:
                assert await connection.ready() is None
    password_file.write_text("wrong")
    ended = await server_command(
        "--redis", own_valkey.url, "--redis-password-file", str(password_file), "--check"
    )
    assert (ended.returncode, "Redis refuses this user" in ended.stderr) == (ExitCode.SUPERSEDED, True)


async def test_a_full_redis_refuses_pushes_and_lets_the_trainer_make_room(
    own_valkey: ValkeyServer, tmp_path: Path
) -> None:
    async with served(own_valkey.url, tmp_path) as world:
        trainer, node = await world.started(dataset="Counting")
        await node.work(2)
        (late, *_) = await node.lease(2)
        await world.dataflow.connection.raw("CONFIG", "SET", "maxmemory", 1)
        with pytest.raises(AstraflowError, match=r"Redis is full \(maxmemory\); let trainers") as refused:
            await node.push(node.episode(late, 0))
        assert refused.value.reason == "RESOURCE_EXHAUSTED"
        assert refused.value.retry_after_s
    # A server and a trainer that start now are what makes room: both must be able to.
    async with served(own_valkey.url, tmp_path) as world:
        world.run_id = "run"
        trainer.world = node.world = world
        await trainer.claim()
        batch = (await trainer.acquire(1)).batch
        assert await trainer.ack(batch, TRAINED) == TRAINED
        await trainer.publish(version=1, step=1)
        assert await trainer.mark_durable(1) in (0, 4)  # the run loop releases too, and may be first
        await world.dataflow.connection.raw("CONFIG", "SET", "maxmemory", 0)
        assert await node.complete(late) == ["ACCEPTED", "ACCEPTED"]
        await world.has_account()
