"""What a process knows of the tasks that it leased, and when episodes are all of some."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.rollout.v1 import task_pb2
from astraflow.rollout.v1.trajectory_pb2 import Episode
from astraflow_dataflow.runs.leased import LeasedTasks
from support.dataflow_world import make_episode

SIZE = 3


def lease(task_id: str = "t", *, attempt: int = 1, data: bytes = b"", **fields: Any) -> task_pb2.Lease:
    """Of a task of which nothing came."""
    purpose = fields.pop("purpose", task_pb2.PURPOSE_TRAINING)
    task = task_pb2.Task(task_id=task_id, group_size=SIZE, data_json=data, purpose=purpose)
    members = fields.pop("members", range(SIZE))
    return task_pb2.Lease(task=task, attempt=attempt, members=members, **fields)


def episodes(task_id: str = "t", **fields: Any) -> list[Episode]:
    """All of a task."""
    return [make_episode(run_id="run", task_id=task_id, member=member, **fields) for member in range(SIZE)]


def known(*leases: task_pb2.Lease, most_bytes: int = 1000) -> LeasedTasks:
    """A process that leased these."""
    tasks = LeasedTasks(most_bytes=most_bytes)
    for one in leases:
        tasks.note(one)
    return tasks


def test_all_members_of_a_task_are_a_whole_task_once() -> None:
    tasks = known(lease(data=b"{}"))
    ((leased, own),) = tasks.take_whole(episodes()[::-1])
    assert (leased.attempt, leased.group_size, own) == (1, SIZE, episodes()[::-1])
    assert task_pb2.Task.FromString(leased.spec) == lease(data=b"{}").task
    assert tasks.take_whole(episodes()) == []


def test_several_tasks_are_whole_together_or_not_at_all() -> None:
    both = lease("a"), lease("b")
    mixed = [one for pair in zip(episodes("a"), episodes("b"), strict=True) for one in pair]
    assert [own for _, own in known(*both).take_whole(mixed)] == [episodes("a"), episodes("b")]
    assert known(*both).take_whole([*episodes("a"), *episodes("b")[:-1]]) == []
    assert known(*both).take_whole([*episodes("a"), *episodes("other")]) == []


def test_a_task_of_which_something_came_is_known_no_longer() -> None:
    tasks = known(lease())
    assert tasks.take_whole(episodes()[:1]) == []
    assert tasks.take_whole(episodes()) == []


def twice(given: list[Episode]) -> None:
    """A member comes twice, and another not."""
    given[2].member = 1


def of_two_nodes(given: list[Episode]) -> None:
    """Another node made one."""
    given[1].node_id = "n2"


def unlike(given: list[Episode]) -> None:
    """One has more trajectories than the others."""
    given[1].trajectories.append(given[1].trajectories[0])


def failed(given: list[Episode]) -> None:
    """One failed."""
    given[0].CopyFrom(make_episode(run_id="run", task_id="t", member=0, failed=True))


def copied(given: list[Episode]) -> None:
    """One is of a second copy of the lease."""
    given[2].hedge = True


def late(given: list[Episode]) -> None:
    """One is of an attempt before."""
    given[2].attempt = 0


@pytest.mark.parametrize("change", [twice, of_two_nodes, unlike, failed, copied, late])
def test_episodes_that_are_not_alike_are_no_whole_task(change: Callable[[list[Episode]], None]) -> None:
    tasks, changed = known(lease()), episodes()
    change(changed)
    assert tasks.take_whole(changed) == []


@pytest.mark.parametrize(
    "leased",
    [
        lease(members=[1, 2]),
        lease(hedge=True),
        lease(uncredited_roles=["critic"]),
        lease(purpose=task_pb2.PURPOSE_EVALUATION),
    ],
    ids=["some came", "a copy", "a role without credit", "evaluation"],
)
def test_a_task_that_is_leased_otherwise_is_forgotten(leased: task_pb2.Lease) -> None:
    assert known(lease(), leased).take_whole(episodes()) == []


def test_only_the_newest_attempt_is_known() -> None:
    assert known(lease(), lease(attempt=2)).take_whole(episodes()) == []
    assert known(lease(), lease(attempt=2)).take_whole(episodes(attempt=2))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60), st.booleans()), max_size=40))
def test_what_is_kept_stays_within_its_bytes_the_newest_last(given: list[tuple[int, int, bool]]) -> None:
    tasks, newest = known(most_bytes=150), dict[str, int]()
    for number, size, is_taken in given:
        name = f"t{number}"
        newest.pop(name, None)
        if is_taken:
            tasks.take_whole(episodes(name))
            continue
        leased = lease(name, data=b"x" * size)
        tasks.note(leased)
        newest[name] = leased.task.ByteSize()
        while sum(newest.values()) > 150:
            newest.pop(next(iter(newest)))
    for name in [f"t{number}" for number in range(6)]:
        assert bool(tasks.take_whole(episodes(name))) == (name in newest)
