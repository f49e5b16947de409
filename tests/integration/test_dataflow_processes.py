"""`astraflow dataflow --processes`: one address, several servers, and none is missed when it dies.

Most tests share what is started once; the last of them ends it.
"""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from astraflow.client import AsyncClient, RetryPolicy
from astraflow.dataflow.v1 import run_service_pb2 as runs
from astraflow_kit.lifecycle import ExitCode
from support.dataflow_process import DataflowProcess
from support.dataflow_world import until
from support.valkey import ValkeyServer, flush

NUM = 3
OPTIONS = ("--processes", str(NUM))


@pytest.fixture(scope="module")
def serving(valkey: ValkeyServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataflowProcess]:
    """Three processes behind one port."""
    flush(valkey.url)
    process = DataflowProcess(valkey.url, tmp_path_factory.mktemp("serving"))
    process.start(options=OPTIONS)
    yield process
    process.kill()


def servers(process: DataflowProcess) -> list[psutil.Process]:
    """The server processes."""
    return psutil.Process(process.pid).children()


async def answers(process: DataflowProcess) -> None:
    """A new connection is served."""
    async with AsyncClient(process.address, retry=RetryPolicy(total_s=20)) as client:
        await client.call(client.runs.ListRuns, runs.ListRunsRequest())


def connections(server: psutil.Process) -> int:
    """Connections of callers to a server."""
    return sum(
        found.status == psutil.CONN_ESTABLISHED and bool(found.laddr) for found in server.net_connections()
    )


async def test_connections_are_spread_over_the_processes(serving: DataflowProcess) -> None:
    before = [connections(server) for server in servers(serving)]
    assert len(before) == NUM
    clients = [AsyncClient(serving.address) for _ in range(32)]
    try:
        await asyncio.gather(
            *(client.call(client.runs.ListRuns, runs.ListRunsRequest()) for client in clients)
        )
        after = [connections(server) for server in servers(serving)]
        # Of 32 connections one of three processes gets none once in 144,000 times.
        assert all(now > then for now, then in zip(after, before, strict=True))
    finally:
        for client in clients:
            await client.close()


async def test_a_run_of_one_process_is_one_of_all(serving: DataflowProcess) -> None:
    async with serving.world() as world:
        await world.create_run()
        trainer, node = await world.trainer(), await world.node()
        await world.submit("a", "b")
    leased = []
    for number in range(6):  # each on a connection of its own
        async with serving.world() as world:
            world.run_id, node.world, trainer.world = "run", world, world
            if number < 2:
                leased += await node.lease(1)
            elif number < 4:
                await node.complete(leased[number - 2])
            else:
                batch = (await trainer.acquire(1)).batch
                assert {item.task_id for item in batch.items} == {"a", "b"}


async def test_a_process_that_is_killed_is_started_again(serving: DataflowProcess) -> None:
    victim = servers(serving)[1]
    victim.kill()

    async def is_replaced() -> bool:
        found = servers(serving)
        return len(found) == NUM and victim.pid not in {server.pid for server in found}

    for _ in range(8):
        await answers(serving)
    await until(is_replaced)


async def test_none_outlives_the_process_that_started_them(serving: DataflowProcess) -> None:
    running = servers(serving)
    serving.kill()
    psutil.wait_procs(running, timeout=20)
    assert not any(server.is_running() for server in running)


async def test_a_signal_ends_them_all(process: DataflowProcess) -> None:
    process.start(options=OPTIONS)
    running = servers(process)
    assert process.signal(signal.SIGTERM) == ExitCode.OK
    assert not any(server.is_running() and server.status() != psutil.STATUS_ZOMBIE for server in running)


def test_what_one_refuses_ends_all_with_its_status(process: DataflowProcess, tmp_path: Path) -> None:
    process.start()
    command = [
        sys.executable,
        "-m",
        "astraflow_dataflow",
        "--redis",
        "redis://127.0.0.1:1",
        "--processes",
        "2",
    ]
    taken = subprocess.run(
        [*command, "--port", str(process.port)], capture_output=True, text=True, timeout=60
    )
    assert taken.returncode == ExitCode.USAGE
    assert f"process {process.pid}" in taken.stderr + taken.stdout
