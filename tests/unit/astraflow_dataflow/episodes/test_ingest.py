"""Ingest answers everybody who waits, whatever becomes of the commit."""

import asyncio
from typing import Any

import pytest

from astraflow.errors import UnavailableError
from astraflow.recipe import RowLimits
from astraflow.rollout.v1 import trajectory_pb2
from astraflow_dataflow.episodes.ingest import Ingest
from astraflow_dataflow.records import Level
from astraflow_dataflow.store.durability import Durability
from astraflow_kit.metrics import Metrics
from support.dataflow_world import make_episode


class Failing:
    """Stands where the stores and the context stand; a commit raises what it was given."""

    run_id = "run"

    def __init__(self, error: BaseException) -> None:
        self._error = error
        self.newest_versions, self.trained_roles = {"solver": 0}, {"solver": "solver"}
        self.row_limits: dict[str, RowLimits] = {}
        self.trained_policies = ("solver",)
        self.blob_prefix = "file:///nowhere/run/blobs/"
        self.episodes = self.recipe = self.dataflow = self
        self.group_deadline_s = 60.0
        self.tasks: list[asyncio.Task[None]] = []

    async def commit(self, *_: object, **__: object) -> object:
        """Fail."""
        raise self._error

    async def push(self, episode: trajectory_pb2.Episode) -> None:
        """Push over an ingest whose commits fail."""
        us: Any = self
        durability = Durability(us, Level.MEMORY)
        ingest = Ingest(store=us, registry=us, settling=us, metrics=Metrics(), durability=durability)
        try:
            await ingest.push(us, [episode])
        finally:
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)


@pytest.mark.parametrize("error", [UnavailableError("away"), RuntimeError("a defect")])
async def test_a_commit_that_fails_answers_its_pushers(error: Exception) -> None:
    with pytest.raises(UnavailableError):
        await Failing(error).push(make_episode(run_id="run", task_id="t", member=0))
