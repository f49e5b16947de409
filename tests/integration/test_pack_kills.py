"""Packs and crashes: a server, or a node, that dies in the middle of one. Each episode counts once."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from astraflow.client import AsyncClient
from astraflow.rollout.v1.trajectory_pb2 import Episode
from astraflow_kit.failpoints import read_hits
from astraflow_kit.metrics import Metrics
from astraflow_raas.push.pushing import Pusher
from astraflow_raas.push.spool import SpoolLimits
from astraflow_raas.push.spool_files import SpoolFiles
from support.dataflow_process import DataflowProcess
from support.dataflow_world import outcome_name

pytestmark = [pytest.mark.integration, pytest.mark.ci, pytest.mark.timeout(120)]

SIZE, TASKS = 4, ("t1", "t2", "t3")


@dataclass(frozen=True)
class Moment:
    """A server that dies at the second of three packs, and what is said of its episodes when they come again."""

    failpoint: str
    hit: int
    second: str
    outside: bool = False


MOMENTS = {
    "before the commit": Moment("dataflow.storing", 2, "ACCEPTED"),
    "payloads are outside, no commit": Moment("dataflow.payloads_stored", 2, "ACCEPTED", outside=True),
    "after the commit, none answered": Moment("dataflow.committed", SIZE + 1, "DUPLICATE"),
    "after the commit, half of them counted": Moment("dataflow.committed", SIZE + 3, "DUPLICATE"),
    "after a commit that is outside": Moment("dataflow.committed", SIZE + 1, "DUPLICATE", outside=True),
}


@asynccontextmanager
async def pushing(address: str, folder: Path, credential: str) -> AsyncIterator[Pusher]:
    """The pusher of the node with this credential, whose packs are of a whole group; at the end it is gone at once,
    as if it was killed.
    """
    limits = SpoolLimits(window_episodes=SIZE)
    async with AsyncClient(address) as client:
        client.session = credential
        pusher = Pusher(client, metrics=Metrics(), limits=limits, files=SpoolFiles(folder / "spool"))
        running = asyncio.create_task(pusher.run())
        try:
            yield pusher
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def leased(process: DataflowProcess) -> tuple[str, list[Episode]]:
    """A node's credential, and three groups that it finished and did not push yet."""
    async with process.world(retry_s=30) as world:
        _, node = await world.started(*TASKS, group_size=SIZE)
        leases = await node.lease(len(TASKS))
        return node.credential, [node.episode(lease, member) for lease in leases for member in lease.members]


def push(pusher: Pusher, episodes: Sequence[Episode]) -> "list[asyncio.Task[object]]":
    """Push, and do not wait for the answers."""
    return [asyncio.create_task(pusher.push(episode)) for episode in episodes]


async def has_all(process: DataflowProcess) -> None:
    """Each episode is there, once."""
    async with process.world(retry_s=30) as world:
        world.run_id = "run"
        status = await world.until(lambda now: now.trajectories.ready == SIZE * len(TASKS))
        assert status.trajectories.ingested == SIZE * len(TASKS)
        assert status.trajectories.conservation_error == 0


def died_at(process: DataflowProcess, moment: Moment) -> None:
    """The server was killed where it was to be."""
    hit = [hit for hit in read_hits(process.failpoints_log) if hit.name == moment.failpoint][moment.hit - 1]
    assert hit.acted


@pytest.mark.parametrize("moment", MOMENTS.values(), ids=list(MOMENTS))
async def test_a_server_killed_in_a_pack_gets_its_episodes_again_and_counts_each_once(
    process: DataflowProcess, tmp_path: Path, moment: Moment
) -> None:
    options = ["--payloads", f"file://{tmp_path}/outside"] if moment.outside else []
    process.start(failpoints=f"{moment.failpoint}=kill@{moment.hit}", options=options)
    credential, episodes = await leased(process)
    async with pushing(process.address, tmp_path, credential) as pusher:
        waiting = push(pusher, episodes)
        await asyncio.to_thread(process.wait_until_ended)
        died_at(process, moment)
        process.start(options=options)
        names = [outcome_name(result) for result in await asyncio.gather(*waiting)]  # type: ignore[arg-type]
    assert names == ["ACCEPTED"] * SIZE + [moment.second] * SIZE + ["ACCEPTED"] * SIZE
    await has_all(process)


async def test_a_node_and_a_server_killed_in_a_pack_lose_nothing_either(
    process: DataflowProcess, tmp_path: Path
) -> None:
    moment = MOMENTS["after the commit, none answered"]
    process.start(failpoints=f"{moment.failpoint}=kill@{moment.hit}")
    credential, episodes = await leased(process)
    async with pushing(process.address, tmp_path, credential) as pusher:
        waiting = push(pusher, episodes)
        await asyncio.to_thread(process.wait_until_ended)
        for task in waiting:
            task.cancel()
    died_at(process, moment)
    process.start()
    async with pushing(process.address, tmp_path, credential) as pusher:
        assert pusher.num_kept == SIZE * len(TASKS)  # none is safe yet, so all are in its files
        assert await pusher.flush(deadline_s=60)
    await has_all(process)
