"""Of a trainer's ranks, the first answers for itself, and the first of each other pod answers probes alone."""

import asyncio

import httpx
import pytest

from astraflow_kit.http import HttpServer
from astraflow_kit.lifecycle import Lifecycle
from astraflow_trainer.server import probes_of_pod
from astraflow_trainer.settings import RankSettings, TrainerSettings


@pytest.mark.parametrize(("local_rank", "answers"), [(0, 1), (1, 0), (None, 0)])
def test_one_rank_of_a_pod_answers(local_rank: int | None, answers: int) -> None:
    settings = TrainerSettings(join="127.0.0.1:7070", probe_port=0)
    rank = RankSettings(rank=2, local_rank=local_rank, world_size=4, master_port=29_500)
    assert len(probes_of_pod(settings, rank, Lifecycle(drain_timeout_s=1))) == answers


async def test_it_has_started_when_everything_beside_it_has() -> None:
    life = Lifecycle(drain_timeout_s=1)
    rank = RankSettings(rank=1, local_rank=0, world_size=2, master_port=29_500)
    (probes,) = probes_of_pod(TrainerSettings(join="127.0.0.1:7070", probe_port=0), rank, life)
    assert isinstance(probes, HttpServer)
    await probes.start()
    serving = asyncio.create_task(probes.run())
    async with httpx.AsyncClient(base_url=f"http://{probes.address}") as client:
        before = [(await client.get(page)).status_code for page in ("/healthz", "/startedz")]
        life.started.set()
        assert [*before, (await client.get("/startedz")).status_code] == [200, 503, 200]
    await probes.stop(deadline_s=1)
    await serving
