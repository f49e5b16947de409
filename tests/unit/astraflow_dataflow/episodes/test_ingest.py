"""Ingest answers everybody who waits, whatever becomes of the commit."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from astraflow.dataflow.v1.durability_pb2 import DURABILITY_MEMORY
from astraflow.dataflow.v1.trajectory_service_pb2 import OUTCOME_ACCEPTED, PushResult
from astraflow.errors import UnavailableError
from astraflow.recipe import RowLimits
from astraflow.rollout.v1 import task_pb2, trajectory_pb2
from astraflow_dataflow.episodes.ingest import TASKS_PER_COMMIT, Ingest
from astraflow_dataflow.records import Level
from astraflow_dataflow.runs.leased import LeasedTasks, WholeTask
from astraflow_dataflow.store.durability import Durability
from astraflow_dataflow.store.episodes.commits import Pushed
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
        self.group_deadline_s, self.max_abs_reward = 60.0, 1e6
        self.tasks: list[asyncio.Task[None]] = []
        self.leased = LeasedTasks()
        us: Any = self
        self.durability: Any = Durability(us, Level.MEMORY)

    async def commit(self, *_: object, **__: object) -> object:
        """Fail."""
        raise self._error

    async def push(self, *episodes: trajectory_pb2.Episode) -> Sequence[Pushed]:
        """Push over an ingest whose commits are these."""
        return (await self.push_each(episodes))[0]

    async def push_each(self, *pushes: Sequence[trajectory_pb2.Episode]) -> Sequence[Sequence[Pushed]]:
        """Several pushes at once."""
        us: Any = self
        ingest = Ingest(store=us, registry=us, settling=us, metrics=Metrics(), durability=self.durability)
        try:
            return await asyncio.gather(*(ingest.push(us, episodes) for episodes in pushes))
        finally:
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)


@pytest.mark.parametrize("error", [UnavailableError("away"), RuntimeError("a defect")])
async def test_a_commit_that_fails_answers_its_pushers(error: Exception) -> None:
    with pytest.raises(UnavailableError):
        await Failing(error).push(make_episode(run_id="run", task_id="t", member=0))


class Counting(Failing):
    """The same, whose commits succeed and are counted by their tasks."""

    def __init__(self) -> None:
        super().__init__(RuntimeError())
        self.commits: list[list[str]] = []
        self.as_known: set[str] = set()
        """Tasks that a commit of whole ones takes."""
        self.snapshots, self.run = (), Mock(identity="0" * 32)
        self.durability = AsyncMock(note=Mock(), reached=Mock(return_value=DURABILITY_MEMORY))

    async def commit(
        self, _: str, episodes: Sequence[trajectory_pb2.Episode], **__: object
    ) -> tuple[list[PushResult], list[object]]:
        """Accept all."""
        self.commits.append([episode.task_id for episode in episodes])
        return [PushResult(outcome=OUTCOME_ACCEPTED, detail=one.episode_id) for one in episodes], []

    async def commit_whole(self, _: object, tasks: Sequence[WholeTask]) -> Mapping[str, Sequence[PushResult]]:
        """Accept those that are as they were known."""
        self.commits.append(["whole", *(own[0].task_id for _, own in tasks)])
        return {
            own[0].task_id: [PushResult(outcome=OUTCOME_ACCEPTED, detail=one.episode_id) for one in own]
            for _, own in tasks
            if own[0].task_id in self.as_known
        }


def leased(task_id: str) -> task_pb2.Lease:
    """Of a task of two members."""
    task = task_pb2.Task(task_id=task_id, group_size=2)
    return task_pb2.Lease(lease_id=f"{task_id}#1", task=task, attempt=1, members=[0, 1])


async def test_a_whole_task_that_is_not_as_it_was_known_is_committed_with_its_answers_in_order() -> None:
    store: Any = Counting()
    store.as_known = {"b"}
    for name in ("a", "b"):
        store.leased.note(leased(name))
    # As they come, not by task.
    given = [
        make_episode(run_id="run", task_id=name, member=member) for member in (1, 0) for name in ("a", "b")
    ]
    taken = await store.push(*given)
    assert store.commits == [["whole", "a", "b"], ["a", "a"]]
    assert [result.detail for result in taken] == [episode.episode_id for episode in given]


async def test_whole_tasks_are_not_committed_with_what_comes_in_parts() -> None:
    store: Any = Counting()
    store.as_known = {"a", "b"}
    for name in ("a", "b", "c"):
        store.leased.note(leased(name))

    def of(name: str, *members: int) -> list[trajectory_pb2.Episode]:
        return [make_episode(run_id="run", task_id=name, member=member) for member in members]

    pushes = [of("a", 0, 1), of("c", 0), of("b", 0, 1)]
    results = await store.push_each(*pushes)
    assert [[one.detail for one in answer] for answer in results] == [
        [one.episode_id for one in push] for push in pushes
    ]
    assert store.commits == [["whole", "a"], ["c"], ["whole", "b"]]


async def test_a_commit_holds_redis_for_no_more_than_so_many_tasks() -> None:
    store: Any = Counting()
    names = [f"t{number}" for number in range(TASKS_PER_COMMIT + 1) for _ in range(2)]
    given = [make_episode(run_id="run", task_id=name, member=place % 2) for place, name in enumerate(names)]
    taken = await store.push(*given)
    assert store.commits == [names[:-2], names[-2:]]
    assert [result.detail for result in taken] == [episode.episode_id for episode in given]
