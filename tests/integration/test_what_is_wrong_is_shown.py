"""`why`, the live view and the line view say what is wrong with the server and its Redis, and when it is over."""

import asyncio
import io
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio
from rich.console import Console

from astraflow.client import AsyncClient
from astraflow.commands.why import NO_SERVER
from astraflow.dataflow.v1 import admin_service_pb2 as pb
from astraflow.errors import RetryableError, UnavailableError
from astraflow_kit.lifecycle import read_address_file
from astraflow_launcher.run.observer import Observer
from astraflow_launcher.view.live import LineView, render
from support.cli import run
from support.dataflow_process import DataflowProcess
from support.dataflow_world import World, answered, until
from support.printed import printed
from support.valkey import ValkeyServer

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(180)]

Commands = tuple[tuple[str | int, ...], ...]


@asynccontextmanager
async def served(valkey: ValkeyServer, folder: Path) -> AsyncIterator[tuple[DataflowProcess, World]]:
    """A server process of its own over this Redis, with a run in which one task is trained."""
    process = DataflowProcess(valkey.url, folder)
    process.start()
    try:
        async with process.world() as world:
            await world.started("task")
            await world.status()
            yield process, world
    finally:
        process.kill()


async def data_waits(world: World) -> list[pb.Wait]:
    return [wait for wait in (await answered(world.why)).waits if wait.stage == "data"]


async def shown_by_both_views(address: str, reason: str) -> str:
    """What the line view wrote, once it and the live view show this wait."""
    output = io.StringIO()
    async with AsyncClient(address) as client:
        observer = Observer(client, "run")
        lines = LineView(Console(file=output, width=400))
        watching = asyncio.create_task(observer.run())

        async def both_do() -> bool:
            lines.show(observer.observation, doing="running")
            live = printed(render(observer.observation, title="run", doing="running"), width=400)
            return reason in live and reason in output.getvalue()

        try:
            await until(both_do)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
    return output.getvalue()


# What is done to Redis and undone, the wait that says so, and its figures.
REFUSES: dict[str, tuple[Commands, Commands, str]] = {
    "redis_full": (
        (("CONFIG", "SET", "maxmemory", 1),),
        (("CONFIG", "SET", "maxmemory", 0),),
        "maxmemory is 1B",
    ),
    "redis_read_only": (
        (("REPLICAOF", "127.0.0.1", 1),),
        (("REPLICAOF", "NO", "ONE"),),
        "a read-only replica of 127.0.0.1:1, link down",
    ),
    "redis_silent": (
        (("CLIENT", "PAUSE", 600_000, "WRITE"),),
        (("CLIENT", "UNPAUSE"),),
        "it answers reads and holds back writes",
    ),
    "redis_disk_full": (
        (("CONFIG", "SET", "save", "3600 1000000"), ("BGSAVE",)),
        (("CONFIG", "SET", "save", ""),),
        "rdb_last_bgsave_status err",
    ),
}


@pytest.mark.parametrize("reason", REFUSES)
async def test_a_redis_that_refuses_writes_is_named_with_its_figures_until_it_takes_them(
    own_valkey: ValkeyServer, tmp_path: Path, reason: str
) -> None:
    spoil, mend, figures = REFUSES[reason]
    # A folder in the place of its file is what it cannot write, whoever it runs as.
    (own_valkey.folder / "dump.rdb" / "full").mkdir(parents=True)
    async with (
        served(own_valkey, tmp_path) as (process, world),
        redis.asyncio.Redis(port=own_valkey.port) as admin,
    ):
        for words in spoil:
            await admin.execute_command(*words)
        await until(lambda: _is_told(world, reason))
        (wait,) = await data_waits(world)
        assert figures in wait.detail, wait.detail
        assert f"Redis at {own_valkey.url}" in wait.detail
        assert wait.released_by
        with pytest.raises(RetryableError) as refused:
            await world.submit("another")
        assert refused.value.metadata["reason"] == reason, "clients know what they wait for"
        assert f"data waits: {reason} — Redis at" in await shown_by_both_views(process.address, reason)
        for words in mend:
            await admin.execute_command(*words)
        await until(lambda: _is_told(world, ""))


async def _is_told(world: World, reason: str) -> bool:
    return [wait.reason for wait in await data_waits(world)] == ([reason] if reason else [])


async def test_a_redis_that_hangs_is_named_and_what_was_read_before_is_still_told(
    own_valkey: ValkeyServer, tmp_path: Path
) -> None:
    async with served(own_valkey, tmp_path) as (process, world):
        before = await world.status()
        with own_valkey.stopped():
            await until(lambda: _is_told(world, "redis_silent"))
            status, why = await world.status(), await world.why()
            assert [wait.reason for wait in why.waits][:1] == ["redis_silent"]
            assert len(why.waits) > 1, "what the run waited for stands beside it"
            assert status.policies == before.policies
            assert before.read_time.ToMilliseconds() <= status.read_time.ToMilliseconds()
            ended = await asyncio.to_thread(run, "why", "--join", world.address)
            assert "blocked: the server's Redis does not answer (data)" in ended.output
            assert "next: start it again" in ended.output
            with pytest.raises(UnavailableError, match=r"Redis at .* gave no answer"):
                await world.submit("another")
            with pytest.raises(UnavailableError, match="nothing can be said of task"):
                await world.why("task")
            assert "redis_silent" in await shown_by_both_views(process.address, "redis_silent")
            # Nobody asks anything of the server but its page of metrics: an alert fires on what it says.
            await until(lambda: _grew(process, beyond_s=0.0))
            first_s = await _silent_seconds(process)
            await until(lambda: _grew(process, beyond_s=first_s))
            page = await _status_page(process)
            assert page["run"]["waits"][0]["reason"] == "redis_silent"
            assert page["run"]["policies"], "what was read before is shown on the page, too"
        await until(lambda: _is_told(world, ""))
        await until(lambda: _grew(process, beyond_s=None))
        assert (await world.status()).read_time.ToMilliseconds() > status.read_time.ToMilliseconds()


async def _page(process: DataflowProcess, path: str) -> httpx.Response:
    published = read_address_file(process.folder / "address.json")
    assert published is not None
    async with httpx.AsyncClient(base_url=f"http://{published.http}", timeout=5) as pages:
        return await pages.get(path, headers={"accept": "application/json"})


async def _status_page(process: DataflowProcess) -> dict[str, Any]:
    """What /status says of each run."""
    runs: dict[str, Any] = (await _page(process, "/status")).json()["runs"]
    return runs


async def _silent_seconds(process: DataflowProcess) -> float | None:
    """What the metrics page says of a Redis that is silent; None where it says nothing of it."""
    line = re.search(
        r'^astraflow_dataflow_redis_wait_seconds\{reason="redis_silent"\} (\S+)$',
        (await _page(process, "/metrics")).text,
        re.MULTILINE,
    )
    return float(line[1]) if line else None


async def _grew(process: DataflowProcess, *, beyond_s: float | None) -> bool:
    """Whether the gauge has gone on since, or with None has gone."""
    now_s = await _silent_seconds(process)
    return now_s is None if beyond_s is None else now_s is not None and now_s > beyond_s


async def test_a_server_that_hangs_or_is_gone_is_named_with_its_address_and_what_goes_on(
    own_valkey: ValkeyServer, tmp_path: Path
) -> None:
    async with served(own_valkey, tmp_path) as (process, world):
        with process.stopped():
            ended = await asyncio.to_thread(run, "why", "--join", world.address)
            assert ended.status == NO_SERVER, ended.output + ended.errors
            assert "everything has waited" in ended.output
            assert f"the dataflow server at {world.address} takes calls and answers none" in ended.output
            assert "meanwhile nodes keep what they finish, trainers wait" in ended.output
            assert "server waits: server_silent" in await shown_by_both_views(
                process.address, "server_silent"
            )
        process.kill()
        ended = await asyncio.to_thread(run, "why", "--json", "--join", world.address)
        assert ended.status == NO_SERVER
        assert ended.json["verdict"]["because"] == "the dataflow server cannot be reached (server)"
        (wait,) = ended.json["waits"]
        assert (wait["stage"], wait["reason"]) == ("server", "server_unreachable")
        assert world.address in wait["detail"]
        assert "start it again" in wait["released_by"]
        assert "server_unreachable" in await shown_by_both_views(process.address, "server_unreachable")
