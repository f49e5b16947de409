"""A trainer that can open nothing more says so by the connection that it has, and `why` of the server shows it."""

import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from astraflow.client import Client
from astraflow_trainer.heartbeat import Heartbeat
from astraflow_trainer.progress import Progress
from support.dataflow_process import DataflowProcess
from support.dataflow_world import World

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@contextmanager
def few_descriptors() -> Iterator[None]:
    """A limit of the process that is two above what it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 2, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
async def world(process: DataflowProcess) -> AsyncIterator[World]:
    """A run on a server of another process, and a connection to it."""
    process.start()
    async with process.world() as world:
        await world.create_run()
        yield world


async def test_a_trainer_that_can_open_nothing_more_is_shown_by_why(world: World) -> None:
    with Client(world.address) as client:
        client.server_info()  # the connection is made while it can be
        heartbeat = Heartbeat(client, run_id=world.run_id, policy_id="solver", progress=Progress())
        with few_descriptors(), heartbeat:
            await world.until(lambda now: "descriptors_exhausted" in {wait.reason for wait in now.waits})
            (wait,) = [wait for wait in (await world.why()).waits if wait.reason == "descriptors_exhausted"]
    assert "file descriptors open" in wait.detail
    assert "ulimit -n" in wait.released_by
