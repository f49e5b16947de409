"""What the dataflow server answers to wrong, late and foreign calls: one row per rule of the contract,
with status code and reason. Values beyond the bound of a field have their rows in `test_field_bounds.py`.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from google.protobuf.message import Message

from astraflow.dataflow.v1 import admin_service_pb2 as admin
from astraflow.dataflow.v1 import batch_service_pb2 as batches
from astraflow.dataflow.v1 import run_pb2, version_pb2
from astraflow.dataflow.v1 import run_service_pb2 as runs
from astraflow.dataflow.v1 import task_service_pb2 as tasks
from astraflow.dataflow.v1 import version_service_pb2 as versions
from astraflow.errors import AstraflowError
from astraflow.rollout.v1 import task_pb2
from support.any_rpc import DENIED, INVALID, MISSING, STATE, answer, assert_refused, request_of
from support.dataflow_world import World, recipe_text

pytestmark = pytest.mark.slow

Call = Message | Callable[[World], Awaitable[object]]
SHA = b"." * 32
RECIPE = recipe_text(name="run")


def create(**fields: Any) -> Message:
    """CreateRun with these fields."""
    return runs.CreateRunRequest(run=run_pb2.Run(**({"run_id": "r", "recipe_yaml": RECIPE} | fields)))


def bundle(path: str, **fields: Any) -> run_pb2.CodeBundle:
    """Code of one file."""
    return run_pb2.CodeBundle(files=[run_pb2.CodeFile(path=path, content=b"x")], **fields)


def update(state: int, **fields: Any) -> Message:
    """UpdateRun to this state."""
    return request_of(runs.UpdateRunRequest, state=state, **fields)


def submit(*submitted: task_pb2.Task) -> Message:
    """SubmitTasks with these tasks."""
    return request_of(tasks.SubmitTasksRequest, tasks=submitted)


def lease(**fields: Any) -> Message:
    """LeaseTasks with these fields."""
    return request_of(tasks.LeaseTasksRequest, **({"max_tasks": 1} | fields))


def of_step(kind: type[Message], **fields: Any) -> Message:
    """A request about step 1."""
    return request_of(kind, **({"step": 1} | fields))


def publish(**fields: Any) -> Message:
    """Publish with these fields of the version."""
    good = {"policy_id": "solver", "version": 1, "step": 1, "manifest_sha256": SHA, "trainer_epoch": 1}
    version = version_pb2.Version(**(good | fields))
    return versions.PublishRequest(run_id="run", version=version, trainer_epoch=1)


async def the_only_run_of_two(world: World) -> object:
    await world.create_run(name="other")
    return await answer(world, runs.GetRunRequest())


async def submit_while_finishing(world: World) -> object:
    await world.finish()
    return await world.submit("t1")


async def acquire_under_an_older_epoch(world: World) -> object:
    trainer = world.trainers["solver"]
    await world.trainer()
    return await trainer.acquire(1)


ROWS: dict[str, tuple[Call, str]] = {
    "run with a broken recipe": (create(recipe_yaml="run: 1"), "INVALID_RECIPE"),
    "run with an unknown plug-in": (
        create(recipe_yaml=recipe_text(dataset="nowhere:Empty")),
        "PLUGIN_FAILED",
    ),
    "run whose code has another digest": (create(code=bundle("recipe.py", sha256=SHA)), "INVALID_RECIPE"),
    "run whose code leaves its folder": (create(code=bundle("../a.py")), INVALID),
    "run whose own code is not allowed": (
        create(recipe_yaml=recipe_text(dataset="recipe:Data")),
        "PLUGIN_FAILED",
    ),
    "run that exists with another store": (create(run_id="run", store_uri="file:///else"), "CONFLICT"),
    "update to an unknown state": (update(run_pb2.RUN_STATE_FINISHED), INVALID),
    "update of an unknown run": (update(run_pb2.RUN_STATE_FINISHING, run_id="nowhere"), MISSING),
    "the only run when there are two": (the_only_run_of_two, STATE),
    **{
        f"submit a task as {task_id}": (submit(task_pb2.Task(task_id=task_id)), INVALID)
        for task_id in ("eval:x", "train-0", "train-", "heldout-7")
    },
    "submit one id with two contents": (
        submit(task_pb2.Task(task_id="t"), task_pb2.Task(task_id="t", source="s")),
        "CONFLICT",
    ),
    "submit an evaluation": (submit(task_pb2.Task(task_id="t", purpose=2)), INVALID),
    "submit data that is not JSON": (submit(task_pb2.Task(task_id="t", data_json=b"{")), INVALID),
    "submit while finishing": (submit_while_finishing, STATE),
    "lease as another node": (lease(node_id="stranger"), DENIED),
    "lease as another incarnation": (lease(incarnation=2), DENIED),
    "claim of an unknown policy": (request_of(batches.ClaimPolicyRequest, policy_id="nobody"), MISSING),
    "claim of a held policy": (request_of(batches.ClaimPolicyRequest, only_if_unheld=True), "POLICY_HELD"),
    "hold under an epoch never given": (request_of(batches.HoldPolicyRequest, trainer_epoch=99), DENIED),
    "hold of another policy": (request_of(batches.HoldPolicyRequest, policy_id="nobody"), DENIED),
    "release of somebody else's policy": (
        request_of(batches.ReleasePolicyRequest, trainer_epoch=99),
        DENIED,
    ),
    "acquire under an epoch never given": (of_step(batches.AcquireBatchRequest, trainer_epoch=99), DENIED),
    "acquire under an older epoch": (acquire_under_an_older_epoch, "FENCED"),
    "acquire a step too far": (of_step(batches.AcquireBatchRequest, step=2), INVALID),
    "fetch of a step that is not bound": (of_step(batches.FetchBatchRequest), MISSING),
    "renewal of a step that is not bound": (of_step(batches.RenewBatchRequest), MISSING),
    "ack of an unbound step": (of_step(batches.AckBatchRequest, stage=batches.BATCH_STAGE_TRAINED), MISSING),
    "ack of no stage": (of_step(batches.AckBatchRequest), INVALID),
    "durable before trained": (of_step(batches.MarkDurableRequest), INVALID),
    "publish a gap": (publish(version=7), "VERSION_GAP"),
    "publish a rollback to a later version": (publish(rollback_of=1), INVALID),
    "publish a rollback that a newer epoch wrote": (publish(rollback_of=0, trainer_epoch=99), INVALID),
    "publish what a newer epoch wrote": (publish(trainer_epoch=99), INVALID),
    "publish of another policy": (publish(policy_id="nobody"), DENIED),
    "watch of an unknown policy": (request_of(versions.WatchRequest, policy_ids=["nobody"]), MISSING),
    "versions of an unknown policy": (request_of(versions.ListVersionsRequest, policy_id="nobody"), MISSING),
    "status of an unknown run": (admin.StatusRequest(run_id="nowhere"), MISSING),
}


@pytest.mark.parametrize("row", ROWS)
async def test_the_server_answers(world: World, row: str) -> None:
    call, reason = ROWS[row]
    await world.create_run(name="run")
    await world.trainer()
    await world.node("n1")
    with pytest.raises(AstraflowError) as refused:
        await (answer(world, call) if isinstance(call, Message) else call(world))
    assert_refused(refused.value, reason)
    assert len(refused.value.message) > 20, "a message says what, which value, which limit and what to do"


async def test_creating_a_run_again_returns_the_stored_one(world: World) -> None:
    first = await world.create_run(name="run")
    assert await world.create_run(name="run") == first
    assert list((await world.ask(runs.ListRunsResponse)).runs) == [first]


async def test_joining_returns_all_a_node_needs(world: World) -> None:
    run = await world.create_run(name="run")
    await world.trainer()
    joined = await world.join("n1", max_concurrent_tasks=1)
    assert joined.run == run
    assert [version.version for version in joined.versions] == [0]
    assert joined.lease_ttl_duration.ToSeconds() == 20
    assert joined.data_incarnation
    assert joined.code_ref.sha256 == run.code.sha256
    assert not joined.code_ref.HasField("bundle"), "it travels in the run"
    assert not joined.store_grants, "file:// is reached by whoever has the folder"
