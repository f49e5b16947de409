"""A run whose tasks all fail alike is stopped by the server, and says why to whoever asks."""

import pytest

from astraflow.dataflow.v1 import run_pb2
from astraflow.dataflow.v1 import run_service_pb2 as runs
from support.dataflow_world import Node, World

pytestmark = pytest.mark.integration

RAISED = "member 0: KeyError: 'totl' (recipe.py:111 in __call__)"


async def fail(node: Node, times: int, *, reason: str = "reward_error", detail: str = RAISED) -> None:
    """Lease and fail tasks, one after the other."""
    for _ in range(times):
        (lease,) = await node.lease()
        await node.fail(lease, reason, detail=detail)


async def test_the_first_failure_is_told_with_its_line_and_how_many_are_like_it(world: World) -> None:
    _, node = await world.started(dataset="Unevaluated")
    await fail(node, 4)
    (found,) = (await world.why()).failures
    assert (found.reason, found.detail, found.count, found.in_a_row) == ("reward_error", RAISED, 4, 4)
    assert (found.task_id, found.node_id) == ("train-0", "n1")
    assert (await world.status()).failures == [found]
    assert (await world.why()).dead_letters == (await world.status()).dead_letters


async def test_an_evaluation_without_training_is_stopped_as_well(world: World) -> None:
    counted = "{every_versions: 0, num_samples: 2, final_samples: 3}"
    await world.create_run(
        dataset="Counting", evaluation=counted, overrides=("run.steps=0",), max_identical_failures=3
    )
    trainer, node = await world.trainer(publish_first=False), await world.node()
    await trainer.publish(version=0, step=0)
    node.serving = {"solver": 0}
    await fail(node, 3)
    stopped = await world.until(lambda now: now.state == run_pb2.RUN_STATE_FINISHED)
    assert "3 times in a row" in stopped.stopped_for
    assert "recipe.py:111" in stopped.stopped_for
    assert [(item.num_samples, item.complete) for item in stopped.evaluations] == [(0, True)]


async def test_a_completed_task_ends_the_row_and_not_the_count(world: World) -> None:
    _, node = await world.started(dataset="Unevaluated")
    await fail(node, 2)
    await node.make_ready(1)
    (found,) = (await world.why()).failures
    assert (found.count, found.in_a_row) == (2, 0)


async def test_what_costs_no_attempt_is_no_failure(world: World) -> None:
    _, node = await world.started(dataset="Unevaluated")
    await fail(node, 2, reason="engine_down", detail="no engine")
    assert not (await world.why()).failures


async def test_a_secret_in_the_message_is_blanked(world: World) -> None:
    _, node = await world.started(dataset="Unevaluated")
    await fail(node, 1, detail="ValueError: cannot reach redis://user:geheim@host:1/ (recipe.py:3 in f)")
    (found,) = (await world.why()).failures
    assert "geheim" not in found.detail
    assert "(recipe.py:3 in f)" in found.detail


async def test_a_run_that_fails_in_a_row_is_stopped_without_a_final_evaluation_and_may_be_continued(
    world: World,
) -> None:
    _, node = await world.started(dataset="Unevaluated", max_identical_failures=5)
    await fail(node, 5)
    stopped = await world.until(lambda now: now.state == run_pb2.RUN_STATE_FINISHED)
    assert "recipe.py:111" in stopped.stopped_for
    assert (await world.why()).stopped_for == stopped.stopped_for
    assert (await world.ask(runs.GetRunResponse)).run.stopped_for == stopped.stopped_for
    assert not any(item.final for item in stopped.evaluations)
    await world.ask(runs.UpdateRunResponse, state=run_pb2.RUN_STATE_ACTIVE)
    again = await world.status()
    assert (again.state, again.stopped_for) == (run_pb2.RUN_STATE_ACTIVE, "")
    assert [item.in_a_row for item in again.failures] == [0]
