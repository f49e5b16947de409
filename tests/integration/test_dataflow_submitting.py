"""A task's id stands for one content as long as anything of it is known, and the run's own ids are nobody else's."""

from typing import Any

import pytest

from astraflow.dataflow.v1 import admin_service_pb2 as admin
from astraflow.dataflow.v1.task_service_pb2 import SubmitTasksResponse
from astraflow.errors import ConflictError, InvalidArgumentError
from astraflow.rollout.v1 import task_pb2
from support.dataflow_world import World, until

ONE: dict[str, Any] = {
    "messages": [task_pb2.Message(role="user", content="2 + 2 = ?")],
    "data_json": b'{"answer": 4}',
    "group_size": 2,
    "source": "sums",
    "priority": 1,
}
OTHERS: dict[str, Any] = {
    "messages": [task_pb2.Message(role="user", content="2 + 3 = ?")],
    "data_json": b'{"answer": 5}',
    "group_size": 3,
    "source": "words",
    "priority": 0,
}


def task(task_id: str = "t", **changed: Any) -> task_pb2.Task:
    """A task that says something in every field but its purpose."""
    return task_pb2.Task(task_id=task_id, **(ONE | changed))


async def submit(world: World, *tasks: task_pb2.Task) -> tuple[int, int]:
    """How many were new, and how many known."""
    answer = await world.ask(SubmitTasksResponse, tasks=tasks)
    return answer.submitted, answer.duplicates


async def refused(world: World, *tasks: task_pb2.Task) -> ConflictError:
    """The conflict that submitting these answers."""
    with pytest.raises(ConflictError) as found:
        await submit(world, *tasks)
    return found.value


def named(error: ConflictError) -> tuple[str, str]:
    """The task and the fields that a conflict is about."""
    return error.metadata["task_id"], error.metadata["field"]


def test_every_field_of_a_task_has_another_content_here() -> None:
    assert {"task_id", "purpose", *OTHERS} == {field.name for field in task_pb2.Task.DESCRIPTOR.fields}


@pytest.mark.parametrize("field", OTHERS)
async def test_other_content_under_a_known_id_is_a_conflict_that_names_the_field(
    world: World, field: str
) -> None:
    _, node = await world.started()
    assert await submit(world, task()) == (1, 0)
    error = await refused(world, task("new"), task(**{field: OTHERS[field]}))
    assert error.message.startswith(f"task t exists with other content: it differs in {field};")
    assert named(error) == ("t", field)
    assert await submit(world, task(), task("new")) == (1, 1), "the call that was refused added nothing"
    assert (await node.lease(1))[0].task == task()


async def test_one_call_with_two_contents_is_a_conflict_and_with_one_twice_a_duplicate(world: World) -> None:
    await world.started()
    error = await refused(world, task(), task(source="words"))
    assert named(error) == ("t", "source")
    assert await submit(world, task(), task()) == (1, 1)


async def test_the_default_group_size_is_the_same_content_as_its_number(world: World) -> None:
    await world.started()
    assert await submit(world, task(group_size=0)) == (1, 0)
    assert await submit(world, task(group_size=2)) == (0, 1)


@pytest.mark.parametrize("is_trained", [False, True])
async def test_a_task_that_is_done_is_compared_by_its_digest(world: World, is_trained: bool) -> None:
    trainer, node = await world.started()
    await submit(world, task(), task("u"))
    await node.work(2)
    if is_trained:
        await trainer.train(1, base_version=0)
    assert await submit(world, task(), task("u")) == (0, 2)
    error = await refused(world, task(source="words"))
    assert "that one is done, and only a digest is left of it, which does not say" in error.message
    assert named(error) == ("t", "")


async def test_a_task_of_the_data_set_whose_id_another_task_has_is_left_out_by_name(world: World) -> None:
    """The ids of this data set begin with no reserved prefix."""
    await world.create_run(dataset="support.data_plugins:Plain")
    await submit(world, task("plain-1"))
    _, node = await world.trainer(), await world.node()
    await node.make_ready(3)

    async def is_told() -> bool:
        events = (await world.ask(admin.ListEventsResponse)).events
        return ("task_conflict", "plain-1") in {(event.kind, event.subject) for event in events}

    await until(is_told)


@pytest.mark.parametrize("task_id", ["train-0", "train-x", "heldout-0", "eval:0:0", "plain:1"])
async def test_ids_of_the_run_are_refused_with_what_to_do(world: World, task_id: str) -> None:
    sources = (
        '{plain: {dataset: "support.dataflow_world:Empty"}, other: {dataset: "support.dataflow_world:Empty"}}'
    )
    await world.create_run(overrides=["run.dataset=null", f"run.sources={sources}"])
    with pytest.raises(InvalidArgumentError, match=r"reserved|evaluation tasks are planned by the server"):
        await submit(world, task(task_id))
    assert await submit(world, task("plain-1"), task("my-train-0")) == (2, 0)
