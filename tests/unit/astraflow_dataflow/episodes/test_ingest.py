"""Ingest answers everybody who waits, whatever becomes of the commit."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from astraflow.errors import InvalidArgumentError, UnavailableError
from astraflow_dataflow.episodes.ingest import Ingest, pushed_episode
from astraflow_dataflow.episodes.settling import Settling
from astraflow_dataflow.records import Level
from astraflow_dataflow.runs.registry import RunContext, RunRegistry
from astraflow_dataflow.store.connection import Connection
from astraflow_dataflow.store.durability import Durability
from astraflow_dataflow.store.store import Store
from astraflow_kit.metrics import Metrics
from support.dataflow_world import make_episode


class Failing:
    """Stands where the stores and the context stand; a commit raises what it was given."""

    run_id = "run"

    def __init__(self, error: BaseException) -> None:
        self._error = error
        self.newest_versions = {"solver": 0}
        self.blob_prefix = "file:///nowhere/run/blobs/"
        self.episodes = self.recipe = self.dataflow = self
        self.group_deadline_s = 60.0

    async def commit(self, *_: object, **__: object) -> object:
        """Fail."""
        raise self._error


def ingest_over(error: BaseException) -> Ingest:
    """An ingest whose commits fail."""
    failing = Failing(error)
    return Ingest(
        cast("RunContext", failing),
        store=cast("Store", failing),
        registry=cast("RunRegistry", failing),
        settling=cast("Settling", failing),
        metrics=Metrics(),
        durability=Durability(cast("Connection", failing), Level.MEMORY),
    )


@pytest.mark.parametrize("error", [UnavailableError("away"), RuntimeError("a defect")])
async def test_a_commit_that_fails_answers_its_pushers(error: Exception) -> None:
    ingest = ingest_over(error)
    running = asyncio.create_task(ingest.run())
    with pytest.raises(UnavailableError):
        await ingest.push(make_episode(run_id="run", task_id="t", member=0))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_an_episode_needs_an_address() -> None:
    ingest = ingest_over(RuntimeError())
    with pytest.raises(InvalidArgumentError):
        await ingest.push(make_episode(run_id="run", task_id="", member=0))
    with pytest.raises(InvalidArgumentError):
        await ingest.push(make_episode(run_id="run", task_id="t", member=1024))


def test_an_episode_keeps_its_bytes() -> None:
    episode = make_episode(run_id="run", task_id="t", member=3, attempt=2, hedge=True)
    pushed = pushed_episode(episode)
    assert (pushed.member, pushed.attempt, pushed.hedge, pushed.failed) == (3, 2, True, False)
    assert pushed.items[0].body == episode.trajectories[0].body
