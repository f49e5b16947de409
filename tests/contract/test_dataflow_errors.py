"""What the dataflow server answers to wrong, late and foreign calls: one row per rule of the contract,
with status code and reason.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from google.protobuf import descriptor_pool

from astraflow._contract import read_contract
from astraflow.dataflow.v1 import (
    admin_service_pb2 as admin,
)
from astraflow.dataflow.v1 import (
    batch_service_pb2 as batches,
)
from astraflow.dataflow.v1 import (
    run_pb2,
    version_pb2,
)
from astraflow.dataflow.v1 import (
    run_service_pb2 as runs,
)
from astraflow.dataflow.v1 import (
    task_service_pb2 as tasks,
)
from astraflow.dataflow.v1 import (
    trajectory_service_pb2 as trajectories,
)
from astraflow.dataflow.v1 import (
    version_service_pb2 as versions,
)
from astraflow.errors import AstraflowError
from astraflow.rollout.v1 import task_pb2, trajectory_pb2
from support.dataflow_world import World, recipe_text, seconds

pytestmark = pytest.mark.slow

Call = Callable[[World], Awaitable[object]]
SHA = b"." * 32


def create(**fields: object) -> Call:
    """CreateRun with these fields."""

    async def call(world: World) -> object:
        request = runs.CreateRunRequest(run=run_pb2.Run(**fields))  # type: ignore[arg-type]
        return await world.client.call(world.client.runs.CreateRun, request)

    return call


def update(state: int, run_id: str = "run") -> Call:
    """UpdateRun to a state."""

    async def call(world: World) -> object:
        request = runs.UpdateRunRequest(run_id=run_id, state=state)  # type: ignore[arg-type]
        return await world.client.call(world.client.runs.UpdateRun, request)

    return call


async def two_runs(world: World) -> object:
    await world.create_run(name="other")
    return await world.client.call(world.client.runs.GetRun, runs.GetRunRequest())


def join(**fields: object) -> Call:
    """JoinRun with these fields."""

    async def call(world: World) -> object:
        merged = {"run_id": "run", "node_id": "n9", "incarnation": 1, "max_concurrent_tasks": 1} | fields
        return await world.client.call(world.client.runs.JoinRun, runs.JoinRunRequest(**merged))  # type: ignore[arg-type]

    return call


async def join_with_an_older_incarnation(world: World) -> object:
    await world.node("n9", incarnation=2)
    return await world.node("n9", incarnation=1)


def submit(*submitted: task_pb2.Task, run_id: str = "run") -> Call:
    """SubmitTasks with these tasks."""

    async def call(world: World) -> object:
        request = tasks.SubmitTasksRequest(run_id=run_id, tasks=submitted)
        return await world.client.call(world.client.tasks.SubmitTasks, request)

    return call


async def submit_while_finishing(world: World) -> object:
    await world.finish()
    return await world.submit("t1")


def lease(**fields: object) -> Call:
    """LeaseTasks with these fields, by node n1."""

    async def call(world: World) -> object:
        await world.node("n1")
        merged = {"run_id": "run", "node_id": "n1", "incarnation": 1, "max_tasks": 1} | fields
        return await world.client.call(world.client.tasks.LeaseTasks, tasks.LeaseTasksRequest(**merged))  # type: ignore[arg-type]

    return call


async def renew_too_many(world: World) -> object:
    request = tasks.RenewLeasesRequest(run_id="run", node_id="n1", lease_ids=["x"] * 4097)
    return await world.client.call(world.client.tasks.RenewLeases, request)


def push(**fields: object) -> Call:
    """PushEpisode with these fields."""

    async def call(world: World) -> object:
        merged = {"run_id": "run", "task_id": "t", "episode_id": "e", "status": 1} | fields
        request = trajectories.PushEpisodeRequest(episode=trajectory_pb2.Episode(**merged))  # type: ignore[arg-type]
        return await world.client.call(world.client.trajectories.PushEpisode, request)

    return call


async def push_out_of_sequence(world: World) -> object:
    call = world.client.open(world.client.trajectories.Push)
    await call.write(
        trajectories.PushRequest(sequence=2, episode=trajectory_pb2.Episode(run_id="run", task_id="t"))
    )
    from astraflow.client import typed_stream

    return [item async for item in typed_stream(call)]


def claim(policy_id: str) -> Call:
    """ClaimPolicy."""

    async def call(world: World) -> object:
        request = batches.ClaimPolicyRequest(run_id="run", policy_id=policy_id)
        return await world.client.call(world.client.batches.ClaimPolicy, request)

    return call


async def claim_what_is_held(world: World) -> object:
    await world.trainer()
    request = batches.ClaimPolicyRequest(run_id="run", policy_id="solver", only_if_unheld=True)
    return await world.client.call(world.client.batches.ClaimPolicy, request)


def hold(**fields: object) -> Call:
    """HoldPolicy, under an epoch never given unless told otherwise."""

    async def call(world: World) -> object:
        merged = {"run_id": "run", "policy_id": "solver", "trainer_epoch": 99} | fields
        return await world.client.call(world.client.batches.HoldPolicy, batches.HoldPolicyRequest(**merged))  # type: ignore[arg-type]

    return call


async def release_as_a_stranger(world: World) -> object:
    await world.trainer()
    request = batches.ReleasePolicyRequest(run_id="run", policy_id="solver", trainer_epoch=99)
    return await world.client.call(world.client.batches.ReleasePolicy, request)


def acquire(**fields: object) -> Call:
    """AcquireBatch with these fields, under the current epoch unless given."""

    async def call(world: World) -> object:
        trainer = await world.trainer()
        merged = {"run_id": "run", "policy_id": "solver", "trainer_epoch": trainer.epoch, "step": 1} | fields
        return await world.client.call(
            world.client.batches.AcquireBatch, batches.AcquireBatchRequest(**merged)
        )  # type: ignore[arg-type]

    return call


def ack(**fields: object) -> Call:
    """AckBatch of a step that is not bound."""

    async def call(world: World) -> object:
        trainer = await world.trainer()
        merged = {"run_id": "run", "policy_id": "solver", "trainer_epoch": trainer.epoch, "step": 1} | fields
        return await world.client.call(world.client.batches.AckBatch, batches.AckBatchRequest(**merged))  # type: ignore[arg-type]

    return call


async def fetch_nothing_bound(world: World) -> object:
    return await (await world.trainer()).fetch(1)


async def renew_nothing_bound(world: World) -> object:
    trainer = await world.trainer()
    request = batches.RenewBatchRequest(run_id="run", policy_id="solver", trainer_epoch=trainer.epoch, step=1)
    return await world.client.call(world.client.batches.RenewBatch, request)


def durable(step: int) -> Call:
    """MarkDurable under the current epoch."""

    async def call(world: World) -> object:
        return await (await world.trainer()).mark_durable(step)

    return call


def publish(*, caller_epoch: int | None = None, **fields: object) -> Call:
    """Publish with these fields of the version, under the current epoch unless given."""

    async def call(world: World) -> object:
        trainer = await world.trainer()
        merged = {
            "policy_id": "solver",
            "version": 1,
            "step": 1,
            "manifest_sha256": SHA,
            "trainer_epoch": trainer.epoch,
        }
        version = version_pb2.Version(**(merged | fields))  # type: ignore[arg-type]
        caller = trainer.epoch if caller_epoch is None else caller_epoch
        request = versions.PublishRequest(run_id="run", version=version, trainer_epoch=caller)
        return await world.client.call(world.client.versions.Publish, request)

    return call


def watch(*policy_ids: str) -> Call:
    """The first answer of Watch."""

    async def call(world: World) -> object:
        request = versions.WatchRequest(run_id="run", policy_ids=policy_ids)
        return [item async for item in world.client.stream(world.client.versions.Watch, request)]

    return call


def list_versions(**fields: object) -> Call:
    """ListVersions with these fields."""

    async def call(world: World) -> object:
        request = versions.ListVersionsRequest(**({"run_id": "run", "policy_id": "solver"} | fields))  # type: ignore[arg-type]
        return await world.client.call(world.client.versions.ListVersions, request)

    return call


async def status_of_nothing(world: World) -> object:
    return await world.client.call(world.client.admin.Status, admin.StatusRequest(run_id="nowhere"))


async def list_runs_with_a_foreign_token(world: World) -> object:
    return await world.client.call(world.client.runs.ListRuns, runs.ListRunsRequest(page_token="next"))


RECIPE = recipe_text(name="run")
INVALID, MISSING, EXISTS, STATE = "INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "FAILED_PRECONDITION"

ROWS: dict[str, tuple[Call, str, str]] = {
    "run id with capitals": (create(run_id="Run"), INVALID, INVALID),
    "run with a broken recipe": (create(run_id="r", recipe_yaml="run: 1"), INVALID, "INVALID_RECIPE"),
    "run with an unknown plug-in": (
        create(run_id="r", recipe_yaml=RECIPE.replace("dataflow_world:Empty", "nowhere:Empty")),
        STATE,
        "PLUGIN_FAILED",
    ),
    "run whose code is not what its digest says": (
        create(
            run_id="r",
            recipe_yaml=RECIPE,
            code=run_pb2.CodeBundle(files=[run_pb2.CodeFile(path="recipe.py", content=b"x")], sha256=SHA),
        ),
        INVALID,
        "INVALID_RECIPE",
    ),
    "run whose code leaves its folder": (
        create(
            run_id="r", recipe_yaml=RECIPE, code=run_pb2.CodeBundle(files=[run_pb2.CodeFile(path="../a.py")])
        ),
        INVALID,
        "INVALID_RECIPE",
    ),
    "run that needs its own code where that is not allowed": (
        create(run_id="r", recipe_yaml=RECIPE.replace("support.dataflow_world:Empty", "recipe:Data")),
        STATE,
        "PLUGIN_FAILED",
    ),
    "run that exists with another store": (
        create(run_id="run", recipe_yaml=RECIPE, store_uri="file:///else"),
        EXISTS,
        "CONFLICT",
    ),
    "update to an unknown state": (update(run_pb2.RUN_STATE_FINISHED), INVALID, INVALID),
    "update of an unknown run": (update(run_pb2.RUN_STATE_FINISHING, "nowhere"), MISSING, MISSING),
    "the only run when there are two": (two_runs, STATE, "FAILED_PRECONDITION"),
    "page token of somebody else": (list_runs_with_a_foreign_token, INVALID, INVALID),
    "join with a bad node id": (join(node_id="a b"), INVALID, INVALID),
    "join without any concurrency": (join(max_concurrent_tasks=0), INVALID, INVALID),
    "join of an unknown run": (join(run_id="nowhere"), MISSING, MISSING),
    "join with an older incarnation": (join_with_an_older_incarnation, STATE, "FENCED"),
    "submit nothing": (submit(), INVALID, INVALID),
    "submit a bad task id": (submit(task_pb2.Task(task_id="a/b")), INVALID, INVALID),
    "submit a task of the server's own": (submit(task_pb2.Task(task_id="eval:x")), INVALID, INVALID),
    "submit an evaluation": (submit(task_pb2.Task(task_id="t", purpose=2)), INVALID, INVALID),
    "submit data that is not JSON": (submit(task_pb2.Task(task_id="t", data_json=b"{")), INVALID, INVALID),
    "submit too large a group": (submit(task_pb2.Task(task_id="t", group_size=1025)), INVALID, INVALID),
    "submit while finishing": (submit_while_finishing, STATE, "FAILED_PRECONDITION"),
    "lease no task": (lease(max_tasks=0), INVALID, INVALID),
    "lease too many tasks": (lease(max_tasks=257), INVALID, INVALID),
    "lease with too long a wait": (lease(wait_duration=seconds(31)), INVALID, INVALID),
    "lease without a join": (lease(node_id="stranger"), MISSING, MISSING),
    "lease as another incarnation": (lease(incarnation=2), STATE, "FENCED"),
    "renew too many leases": (renew_too_many, INVALID, INVALID),
    "push without a task": (push(task_id=""), INVALID, INVALID),
    "push of an impossible member": (push(member=1024), INVALID, INVALID),
    "push to an unknown run": (push(run_id="nowhere"), MISSING, MISSING),
    "push stream that does not count from one": (push_out_of_sequence, INVALID, INVALID),
    "claim of an unknown policy": (claim("nobody"), MISSING, MISSING),
    "claim of a policy that is held": (claim_what_is_held, STATE, "POLICY_HELD"),
    "hold of a policy under an epoch never given": (hold(), STATE, "FENCED"),
    "hold of an unknown policy": (hold(policy_id="nobody"), MISSING, MISSING),
    "release of a policy of somebody else's": (release_as_a_stranger, STATE, "FENCED"),
    "acquire under an older epoch": (acquire(trainer_epoch=0), STATE, "FENCED"),
    "acquire under an epoch never given": (acquire(trainer_epoch=99), STATE, "FENCED"),
    "acquire a step too far": (acquire(step=2), INVALID, INVALID),
    "acquire step zero": (acquire(step=0), INVALID, INVALID),
    "acquire with too long a wait": (acquire(wait_duration=seconds(31)), INVALID, INVALID),
    "fetch of a step that is not bound": (fetch_nothing_bound, MISSING, MISSING),
    "renewal of a step that is not bound": (renew_nothing_bound, MISSING, MISSING),
    "ack of a step that is not bound": (ack(stage=batches.BATCH_STAGE_TRAINED), MISSING, MISSING),
    "ack of no stage": (ack(), INVALID, INVALID),
    "durable before trained": (durable(1), INVALID, INVALID),
    "publish with a short digest": (publish(manifest_sha256=b"x"), INVALID, INVALID),
    "publish a gap": (publish(version=7), STATE, "VERSION_GAP"),
    "publish before the step is trained": (publish(), INVALID, INVALID),
    "publish under an older epoch": (publish(caller_epoch=0), STATE, "FENCED"),
    "publish a rollback to a later version": (publish(rollback_of=1), INVALID, INVALID),
    "publish a rollback that a newer epoch wrote": (
        publish(rollback_of=0, trainer_epoch=99),
        INVALID,
        INVALID,
    ),
    "publish what a newer epoch wrote": (publish(trainer_epoch=99), INVALID, INVALID),
    "publish of an unknown policy": (publish(policy_id="nobody"), MISSING, MISSING),
    "publish other bytes under a known number": (
        publish(version=0, step=0, manifest_sha256=b"x" * 32),
        EXISTS,
        "CONFLICT",
    ),
    "watch of an unknown policy": (watch("nobody"), MISSING, MISSING),
    "versions of an unknown policy": (list_versions(policy_id="nobody"), MISSING, MISSING),
    "versions after a foreign token": (list_versions(page_token="x"), INVALID, INVALID),
    "status of an unknown run": (status_of_nothing, MISSING, MISSING),
}


def declared(error: AstraflowError) -> bool:
    """Whether the contract of the rpc that refused lists the reason."""
    _, service, name = error.metadata["rpc"].split("/")
    method = descriptor_pool.Default().FindServiceByName(service).methods_by_name[name]
    return read_contract(method).may_answer(error.reason)


@pytest.mark.parametrize("row", ROWS)
async def test_the_server_answers(world: World, row: str) -> None:
    call, code, reason = ROWS[row]
    await world.create_run(name="run")
    with pytest.raises(AstraflowError) as refused:
        await call(world)
    assert (refused.value.code, refused.value.reason) == (code, reason), refused.value.message
    assert declared(refused.value), f"{refused.value.metadata['rpc']} does not list {reason}"
    assert len(refused.value.message) > 20, "a message says what, which value, which limit and what to do"


async def test_creating_a_run_again_returns_the_stored_one(world: World) -> None:
    first = await world.create_run(name="run")
    assert await world.create_run(name="run") == first
    listed = await world.client.call(world.client.runs.ListRuns, runs.ListRunsRequest())
    assert list(listed.runs) == [first]


async def test_joining_returns_all_a_node_needs(world: World) -> None:
    run = await world.create_run(name="run")
    await world.trainer()
    request = runs.JoinRunRequest(node_id="n1", incarnation=1, max_concurrent_tasks=1)
    joined = await world.client.call(world.client.runs.JoinRun, request)
    assert joined.run == run
    assert [version.version for version in joined.versions] == [0]
    assert joined.lease_ttl_duration.ToSeconds() == 20
    assert joined.data_incarnation
    assert joined.code_ref.sha256 == run.code.sha256
    assert not joined.code_ref.HasField("bundle"), "it travels in the run"
    assert not joined.store_grants, "file:// is reached by whoever has the folder"
