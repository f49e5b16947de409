"""Evaluations on request: their turn, their versions, their share of the nodes, and what is refused."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from astraflow.dataflow.v1 import evaluation_service_pb2 as pb
from astraflow.dataflow.v1 import version_service_pb2
from astraflow.errors import AstraflowError, ConflictError, InvalidArgumentError, PreconditionError
from astraflow.rollout.v1 import task_pb2
from support.cli import run
from support.dataflow_world import Node, Trainer, World

pytestmark = pytest.mark.integration

# The recipe's own first pass is over at once: the data set has no held-out task.
FIRST_ONLY = "{every_versions: 0, num_samples: 2, final_samples: 1}"
MINE = [task_pb2.Task(task_id=f"mine-{number}", source="ab"[number]) for number in range(2)]


async def started(world: World, **recipe: object) -> tuple[Trainer, Node]:
    """A run with version 0, a node that serves it, and no pass of the recipe any more."""
    trainer, node = await world.started(**({"dataset": "Unevaluated", "evaluation": FIRST_ONLY} | recipe))
    node.serving = {"solver": 0}
    await world.until(lambda now: [item.complete for item in now.evaluations] == [True])
    return trainer, node


async def requested(world: World, name: str = "mine", **fields: Any) -> pb.EvaluationPass:
    """Ask for an evaluation on own tasks."""
    fields = {"tasks": MINE} | fields
    return (await world.ask(pb.RequestEvaluationResponse, evaluation_id=name, **fields)).evaluation


async def found(world: World, name: str = "mine") -> pb.GetEvaluationResponse:
    """The evaluation in full."""
    return await world.ask(pb.GetEvaluationResponse, evaluation_id=name)


async def in_state(world: World, state: int, name: str = "mine") -> pb.EvaluationPass:
    """The evaluation once it is in this state."""
    while True:
        seen = (await found(world, name)).evaluation
        if seen.state == state:
            return seen
        await world.status()


async def is_open(world: World, name: str = "mine") -> pb.EvaluationPass:
    """The evaluation once its tasks are queued."""
    seen = await in_state(world, pb.EVALUATION_STATE_OPEN, name)
    while len((await found(world, name)).tasks) * seen.samples_per_task < seen.num_planned:
        await world.status()
    return seen


async def listed(world: World) -> list[str]:
    """Names and states, newest first."""
    answer = await world.ask(pb.ListEvaluationsResponse)
    return [f"{item.evaluation_id} {item.state}" for item in answer.evaluations]


async def trained(trainer: Trainer, node: Node) -> None:
    """Train step 1 and announce version 1, with groups of a node that evaluates nothing."""
    node.serving = {}
    await node.make_ready(2)
    await trainer.train(1, base_version=0)


async def test_own_tasks_are_scored_sample_by_sample_by_source(world: World) -> None:
    _, node = await started(world)
    asked = await requested(world, samples_per_task=2)
    assert (asked.requested, asked.has_own_tasks, asked.num_planned) == (True, True, 4)
    await is_open(world)
    leases = [lease for lease in await node.lease(4) if lease.required_versions]
    while len(leases) < 4:
        leases += [lease for lease in await node.lease(4) if lease.required_versions]
    by_id = {lease.task.task_id: lease for lease in leases}
    assert sorted(by_id) == [f"eval:0:mine:{sample}" for sample in range(4)]
    for sample, reward in enumerate([1.0, 0.0, 0.0, 0.0]):
        lease = by_id[f"eval:0:mine:{sample}"]
        assert (lease.task.source, dict(lease.required_versions)) == ("ab"[sample // 2], {"solver": 0})
        assert await node.complete(lease, reward=reward) == ["ACCEPTED"]
    ended = await in_state(world, pb.EVALUATION_STATE_COMPLETE)
    assert (ended.num_done, ended.num_failed, dict(ended.versions)) == (4, 0, {"solver": 0})
    answer = await found(world)
    assert [(task.task_id, [item.reward for item in task.samples]) for task in answer.tasks] == [
        ("mine-0", [1.0, 0.0]),
        ("mine-1", [0.0, 0.0]),
    ]
    # One task of two passes with 1 of 2 samples: pass@1 = (1/2 + 0) / 2, pass@2 = (1 + 0) / 2.
    scores = {score.source: score for score in answer.scores}
    assert (scores[""].avg_at_k, [item.value for item in scores[""].pass_at_k]) == (0.25, [0.25, 0.5])
    assert (scores["a"].avg_at_k, scores["b"].avg_at_k) == (0.5, 0.0)
    await world.has_account(evaluated=4)


async def test_held_out_tasks_of_the_data_set_are_as_many_as_asked(world: World) -> None:
    _, node = await world.started(dataset="Counting", evaluation=FIRST_ONLY)
    node.serving = {"solver": 0}
    await world.until(lambda now: len(now.evaluations) == 1)
    await requested(world, tasks=[], num_tasks=3)
    while (
        len(await listed(world)) < 2 or (await found(world)).evaluation.state == pb.EVALUATION_STATE_WAITING
    ):
        await node.complete_all([item for item in await node.lease(2) if item.required_versions])
    opened = await is_open(world)
    assert (opened.num_planned, opened.has_own_tasks) == (3, False)
    assert [task.task_id for task in (await found(world)).tasks] == ["heldout-0", "heldout-1", "heldout-2"]


async def test_one_is_open_at_a_time_and_the_next_one_follows(world: World) -> None:
    await started(world)
    await requested(world, "first")
    await is_open(world, "first")
    await requested(world, "second")
    assert await listed(world) == ["second 1", "first 2", "0:periodic 3"]
    await world.ask(pb.CancelEvaluationResponse, evaluation_id="first")
    await is_open(world, "second")
    assert (await listed(world))[:2] == ["second 2", "first 5"]


async def test_a_named_version_is_pinned_and_held_for_nodes_until_its_turn_is_over(world: World) -> None:
    trainer, node = await started(world)
    await requested(world, "first")
    await is_open(world, "first")
    await requested(world, "second", versions={"solver": 0})
    await trained(trainer, node)
    context = await world.dataflow.registry.get(world.run_id)
    for_nodes = world.dataflow.versions.for_nodes

    async def pins() -> dict[int, str]:
        answer = await world.ask(version_service_pb2.ListVersionsResponse, policy_id="solver")
        return {pin.version: pin.reason for pin in answer.pins}

    assert await pins() == {0: "evaluation first"}
    await world.ask(pb.CancelEvaluationResponse, evaluation_id="first")
    assert await for_nodes(context, "solver", 0) == [], "the second one waits for version 0"
    assert dict((await is_open(world, "second")).versions) == {"solver": 0}
    await world.ask(pb.CancelEvaluationResponse, evaluation_id="second")
    assert [version.version for version in await for_nodes(context, "solver", 0)] == [1]
    assert await pins() == {}


async def test_requests_take_at_most_their_share_of_a_node_while_there_is_training(world: World) -> None:
    _, node = await started(world, group_size=1, groups_per_step=64)
    tasks = [task_pb2.Task(task_id=f"mine-{number}") for number in range(10)]
    await requested(world, tasks=tasks)
    await is_open(world)
    leases = await node.lease(8)
    assert [bool(lease.required_versions) for lease in leases] == [True] * 4 + [False] * 4
    await node.complete(leases[-1])
    (another,) = await node.lease(1)
    assert not another.required_versions, "the place of a training task is one of training"
    await node.complete(leases[0])
    (another,) = await node.lease(1)
    assert another.required_versions


async def test_requests_take_every_place_that_training_leaves(world: World) -> None:
    _, node = await started(world, dataset="Empty")
    tasks = [task_pb2.Task(task_id=f"mine-{number}") for number in range(8)]
    await requested(world, tasks=tasks)
    await is_open(world)
    assert len(await node.lease(8)) == 8


async def test_cancelling_an_open_one_frees_its_leases_and_keeps_its_results(world: World) -> None:
    _, node = await started(world, dataset="Empty")
    await requested(world)
    await is_open(world)
    first, second = await node.lease(2)
    await node.complete(first, reward=1.0)
    for _ in range(2):
        ended = (await world.ask(pb.CancelEvaluationResponse, evaluation_id="mine")).evaluation
        assert (ended.state, ended.num_done) == (pb.EVALUATION_STATE_CANCELLED, 1)
    assert await node.complete(second) == ["LATE_CLOSED"]
    assert [score.num_samples for score in (await found(world)).scores if not score.source] == [1]
    await world.has_account(evaluated=1, dropped={"late_closed": 1})


async def test_a_request_that_waits_is_cancelled_and_never_opened(world: World) -> None:
    await started(world)
    await requested(world, "first")
    await is_open(world, "first")
    await requested(world, "second")
    await world.ask(pb.CancelEvaluationResponse, evaluation_id="second")
    await world.ask(pb.CancelEvaluationResponse, evaluation_id="first")
    await world.status()
    assert (await listed(world))[:2] == ["second 5", "first 5"]


async def test_a_finishing_run_gives_up_what_waits_and_what_is_open(world: World) -> None:
    _, node = await started(world)
    await requested(world, "first")
    await is_open(world, "first")
    await requested(world, "second")
    await world.finish()
    for name in ("first", "second"):
        ended = await in_state(world, pb.EVALUATION_STATE_GIVEN_UP, name)
        assert ended.reason == "run_finished"
    with pytest.raises(PreconditionError, match="the run has ended"):
        await requested(world, "third")
    assert node.serving == {"solver": 0}


async def test_the_same_request_again_is_the_same_and_another_one_a_conflict(world: World) -> None:
    await started(world)
    first = await requested(world)
    again = await requested(world)
    assert (first.evaluation_id, first.create_time) == (again.evaluation_id, again.create_time)
    with pytest.raises(ConflictError, match="another name"):
        await requested(world, samples_per_task=3)


TWICE = [task_pb2.Task(task_id="mine")] * 2
REFUSED: dict[str, tuple[dict[str, Any], type[AstraflowError], str]] = {
    "not announced": ({"versions": {"solver": 7}}, PreconditionError, "its newest announced one, 0"),
    "of no policy": ({"versions": {"nobody": 0}}, InvalidArgumentError, "it trains: solver"),
    "both kinds": ({"num_tasks": 3}, InvalidArgumentError, "exclude each other"),
    "twice": ({"tasks": TWICE}, InvalidArgumentError, "comes twice"),
    "too many samples": (
        {"tasks": [], "num_tasks": 1_000_000, "samples_per_task": 2},
        InvalidArgumentError,
        "2,000,000 samples",
    ),
    "the lane of training": ({"evaluation_id": "train"}, InvalidArgumentError, "another name"),
    "no name": ({"evaluation_id": ""}, InvalidArgumentError, "give it a name"),
}


@pytest.mark.parametrize("row", REFUSED)
async def test_a_request_that_cannot_be_served_says_why(world: World, row: str) -> None:
    await started(world)
    fields, error, words = REFUSED[row]
    with pytest.raises(error, match=words):
        await world.ask(pb.RequestEvaluationResponse, **({"evaluation_id": "mine", "tasks": MINE} | fields))
    assert await listed(world) == ["0:periodic 3"]


async def test_an_older_version_is_refused_with_the_one_to_ask_for(world: World) -> None:
    trainer, node = await started(world)
    await trained(trainer, node)
    with pytest.raises(PreconditionError, match="newest announced one, 1; nodes only go forward"):
        await requested(world, versions={"solver": 0})


async def test_at_most_eight_wait(world: World) -> None:
    await started(world)
    await requested(world, "open")
    await is_open(world, "open")
    for number in range(8):
        await requested(world, f"waits-{number}")
    with pytest.raises(PreconditionError, match="8 evaluations wait"):
        await requested(world, "one-more")


async def test_only_requests_are_cancelled(world: World) -> None:
    await started(world)
    with pytest.raises(PreconditionError, match="is the recipe's"):
        await world.ask(pb.CancelEvaluationResponse, evaluation_id="0:periodic")
    with pytest.raises(InvalidArgumentError, match="name the evaluation"):
        await world.ask(pb.CancelEvaluationResponse)


async def test_requests_and_passes_of_the_recipe_take_turns(world: World) -> None:
    evaluation = "{every_versions: 1, num_samples: 1, final_samples: 1}"
    trainer, node = await started(world, dataset="Unevaluated", evaluation=evaluation)
    await requested(world, "first")
    await is_open(world, "first")
    await requested(world, "second")
    await trained(trainer, node)
    await world.ask(pb.CancelEvaluationResponse, evaluation_id="first")
    await is_open(world, "second")
    assert [name.partition(" ")[0] for name in await listed(world)] == [
        "second",
        "1:periodic",
        "first",
        "0:periodic",
    ]


@pytest.mark.usefixtures("quiet")
async def test_the_command_asks_waits_lists_shows_and_cancels(world: World, tmp_path: Path) -> None:
    _, node = await started(world, dataset="Empty")
    file = tmp_path / "mine.jsonl"
    file.write_text('{"id": "mine-0", "prompt": "1 + 1 =", "data": {"answer": 2}, "source": "sums"}\n\n')

    async def evaluations(*arguments: str, status: int = 0) -> Any:
        ended = await asyncio.to_thread(run, "evaluations", *arguments, "--join", world.address)
        assert ended.status == status, ended.errors
        return ended

    asking = asyncio.create_task(
        evaluations("request", "--name", "mine", "--tasks", str(file), "--samples", "2", "--wait", "--json")
    )
    leases: list[task_pb2.Lease] = []
    while len(leases) < 2:
        leases += await node.lease(2)
    assert json.loads(leases[0].task.data_json) == {"answer": 2}
    await node.complete(leases[0], reward=1.0)
    await node.complete(leases[1], reward=0.0)
    found_all = (await asking).json
    assert [item["reward"] for item in found_all["tasks"][0]["samples"]] == [1.0, 0.0]
    assert "mine" in (await evaluations("list")).output
    shown = (await evaluations("show", "mine")).output
    assert [
        word for word in ("mine is complete", "avg@2", "pass@2", "sums", "0.500") if word not in shown
    ] == []
    await evaluations("request", "--name", "other", "--tasks", str(file), "--version", "solver=0")
    assert "other is cancelled" in (await evaluations("cancel", "other")).output
    file.write_text('{"id": "mine-0"}\n')
    refused = await evaluations("request", "--tasks", str(file), status=2)
    assert "mine.jsonl:1: KeyError: 'prompt'" in refused.errors
    refused = await evaluations("request", "--version", "7", status=2)
    assert "give POLICY=N" in refused.errors
