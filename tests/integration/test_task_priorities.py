"""Priorities: urgent tasks first, no lane starves, and all that happens to a task happens in its own lane."""

import pytest

from astraflow.dataflow.v1 import task_service_pb2 as pb
from astraflow.errors import InvalidArgumentError, PluginError
from astraflow.plugins import TaskSpec
from astraflow.rollout.v1 import task_pb2
from astraflow_dataflow.tasks.curation import new_task
from support.dataflow_world import Node, World, until_equal

pytestmark = pytest.mark.integration

WIDE = {"groups_per_step": 64, "group_size": 1}


async def submitted(world: World, count: int, *, priority: int) -> None:
    """Submit `p<priority>-0`, `p<priority>-1` …"""
    tasks = [task_pb2.Task(task_id=f"p{priority}-{number}", priority=priority) for number in range(count)]
    await world.ask(pb.SubmitTasksResponse, tasks=tasks)


async def leased(node: Node, count: int) -> list[str]:
    """Ids of so many leases, in order."""
    return [lease.task.task_id for lease in await node.lease(count, wait_s=0)]


async def test_urgent_tasks_come_first_and_every_fourth_lease_takes_the_lanes_in_turn(world: World) -> None:
    _, node = await world.started(**WIDE)
    for priority in (0, 1, 3):
        await submitted(world, 16, priority=priority)
    ids = [name.partition("-")[0] for name in await leased(node, 12)]
    # Lanes from the top are p3, p1, p0: the fourth fresh lease is of p1, the eighth of p0, the twelfth of p3.
    assert ids == [*["p3"] * 3, "p1", *["p3"] * 3, "p0", *["p3"] * 4]


async def test_each_lane_is_served_in_the_order_of_submission_until_all_are_empty(world: World) -> None:
    _, node = await world.started(**WIDE)
    await submitted(world, 3, priority=0)
    await submitted(world, 3, priority=2)
    assert await leased(node, 9) == ["p2-0", "p2-1", "p2-2", "p0-0", "p0-1", "p0-2"]

    async def waiting_for() -> str:
        return (await node.lease_reply()).waiting_for

    await until_equal(waiting_for, "dataset_exhausted")  # the run loop finds out


async def test_a_task_given_back_keeps_its_lane_and_ends_in_it(world: World) -> None:
    _, node = await world.started(**WIDE)
    await submitted(world, 1, priority=2)
    (lease,) = await node.lease(1)
    assert await node.fail(lease, "drain") is True
    (again,) = await node.lease(1)
    assert (again.task.task_id, again.task.priority) == ("p2-0", 2)
    assert await node.complete(again) == ["ACCEPTED"]
    await world.has_account(ingested=1, ready=1)
    supply = await world.dataflow.store.tasks.supply(world.run_id)
    assert supply.queued == 0
    trace = (await world.why("p2-0")).task
    assert trace.trajectories[0].place != 0


async def test_a_requeued_dead_letter_is_as_urgent_as_before(world: World) -> None:
    _, node = await world.started(**WIDE)
    await submitted(world, 1, priority=1)
    (lease,) = await node.lease(1)
    await node.fail(lease, "workflow_error", retryable=False)
    await submitted(world, 1, priority=0)
    await world.until(lambda now: now.trajectories.conservation_error == 0)
    while (await world.requeue())[0] == 0:
        await world.status()
    assert await leased(node, 2) == ["p1-0", "p0-0"]


async def test_queued_tasks_of_all_priorities_are_counted(world: World) -> None:
    await world.started(**WIDE)
    await submitted(world, 2, priority=0)
    await submitted(world, 3, priority=3)
    assert (await world.dataflow.store.tasks.supply(world.run_id)).queued == 5


async def test_a_priority_beyond_the_highest_is_refused(world: World) -> None:
    await world.started(**WIDE)
    with pytest.raises(InvalidArgumentError, match="at most 3"):
        await submitted(world, 1, priority=4)
    with pytest.raises(PluginError, match="priority -1; give it one of 0 to 3"):
        new_task(TaskSpec("t", (), priority=-1), purpose=task_pb2.PURPOSE_TRAINING, group_size=1)
    spec = TaskSpec("t", (), priority=3)
    assert new_task(spec, purpose=task_pb2.PURPOSE_TRAINING, group_size=1).priority == 3
