"""No caller sets a counter: of each field that names one, the largest values that there are leave the run usable."""

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from astraflow.dataflow.v1 import admin_service_pb2 as admin
from astraflow.dataflow.v1 import batch_service_pb2 as batches
from astraflow.dataflow.v1 import evaluation_service_pb2 as evaluations
from astraflow.dataflow.v1 import run_pb2, version_pb2
from astraflow.dataflow.v1 import run_service_pb2 as runs
from astraflow.dataflow.v1 import sample_service_pb2 as samples
from astraflow.dataflow.v1 import task_service_pb2 as tasks
from astraflow.dataflow.v1 import trajectory_service_pb2 as trajectories
from astraflow.dataflow.v1 import version_service_pb2 as versions
from astraflow.errors import AstraflowError, InvalidArgumentError, PermissionError_
from astraflow.raas.v1 import environment_service_pb2 as environments
from astraflow.rollout.v1 import trajectory_pb2
from astraflow.trainer.v1 import trainer_service_pb2 as trainers
from support.any_rpc import answer, request_of
from support.dataflow_world import World, make_episode
from support.source_tree import REPOSITORY

sys.path.append(str(REPOSITORY / "proto"))
from contracts_page import COUNTERS

pytestmark = pytest.mark.slow

INTEGERS = {FieldDescriptor.CPPTYPE_UINT64, FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_INT64}
NAMES_ONE = re.compile(
    "epoch|steps?$|_step$|version|incarnation|sequence|attempt|turn$|received|unreadable|draws|number$|rollback_of"
)
OWN = {"TrajectoryHeader.turn"}
"""What the server sets itself, and replaces where a client says it."""
STEP = {"step": 1, "batch_id": "b", "digest": b"."}
VERSION = version_pb2.Version(
    policy_id="solver", version=1, step=1, manifest_sha256=b"." * 32, trainer_epoch=1, rollback_of=0
)
REQUESTS: list[Message] = [
    request_of(
        batches.ClaimPolicyRequest,
        trainer_id="t",
        accepted_loss=batches.AcceptedLoss(identity="0" * 32),
    ),
    *(
        request_of(kind, **{name: STEP[name] for name in STEP if name in kind.DESCRIPTOR.fields_by_name})
        for kind in (
            batches.HoldPolicyRequest,
            batches.ReleasePolicyRequest,
            batches.AcquireBatchRequest,
            batches.FetchBatchRequest,
            batches.NackBatchRequest,
            batches.RenewBatchRequest,
            batches.MarkDurableRequest,
        )
    ),
    request_of(batches.AckBatchRequest, stage=batches.BATCH_STAGE_TRAINED, **STEP),
    request_of(batches.VoidBatchRequest, step=1, batch_id="b", action=batches.VOID_ACTION_DISCARD),
    request_of(versions.PublishRequest, version=VERSION),
    request_of(versions.PinVersionRequest),
    request_of(versions.UnpinVersionRequest),
    request_of(evaluations.RequestEvaluationRequest, evaluation_id="mine", versions={"solver": 0}),
    request_of(runs.JoinRunRequest, max_concurrent_tasks=1),
    request_of(runs.CreateRunRequest, run=run_pb2.Run(run_id="run", switches=[run_pb2.PluginSwitch()])),
    request_of(tasks.LeaseTasksRequest, max_tasks=1, serving_versions={"solver": 0}),
    tasks.WorkRequest(hello=tasks.Hello(run_id="run", node_id="n1")),
    tasks.WorkRequest(
        credits=tasks.Credits(
            weight_faults=[version_pb2.WeightFault(policy_id="solver")], serving_versions={}
        )
    ),
    trajectories.PushRequest(episodes=[make_episode(run_id="run", task_id="t1", member=0)]),
    request_of(admin.ListStepsRequest),
    request_of(samples.ListSamplesRequest),
]
ELSEWHERE = {
    "ResetRequest.holder_incarnation": environments.ResetRequest,
    "StepRequest.turn": environments.StepRequest,
    "WatchMetricsRequest.after_step": trainers.WatchMetricsRequest,
    "VersionSpan.version": trajectory_pb2.VersionSpan,
}
"""Fields of other services, and of the body of a trajectory; their own tests try those."""


def holders(message: Message) -> Iterator[Message]:
    """A message and all that it has."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for inner in value if field.is_repeated else [value]:
                yield from holders(inner)


def counters(described: Descriptor) -> list[str]:
    """The fields of a message that name a counter."""
    return [
        field.name
        for field in described.fields
        if NAMES_ONE.search(field.name)
        and f"{described.name}.{field.name}" not in OWN
        and (
            field.message_type.fields_by_name["value"].cpp_type
            if field.message_type is not None and field.message_type.GetOptions().map_entry
            else field.cpp_type
        )
        in INTEGERS
    ]


FOUND = {
    f"{held.DESCRIPTOR.name}.{name}": number
    for number, request in enumerate(REQUESTS)
    for held in holders(request)
    for name in counters(held.DESCRIPTOR)
}


def requested() -> Iterator[Descriptor]:
    """Every message that some rpc is sent, with those in it."""
    pool, seen = descriptor_pool.Default(), set[str]()
    modules = [
        admin,
        batches,
        evaluations,
        runs,
        samples,
        tasks,
        trajectories,
        versions,
        environments,
        trainers,
    ]
    services = [service for module in modules for service in module.DESCRIPTOR.services_by_name.values()]
    waiting = [rpc.input_type for service in services for rpc in service.methods]
    waiting.append(pool.FindMessageTypeByName("astraflow.rollout.v1.Trajectory"))
    while waiting:
        described = waiting.pop()
        if described.full_name not in seen and described.full_name.startswith("astraflow."):
            seen.add(described.full_name)
            yield described
            waiting += [field.message_type for field in described.fields if field.message_type is not None]


def test_every_counter_that_a_request_names_has_a_bound_in_the_table_and_is_tried() -> None:
    named = {
        (described.name, name)
        for described in requested()
        for name in counters(described)
        if not described.GetOptions().map_entry
    }
    lacking = {
        f"{message}.{name}" for message, name in named if not {f"{message}.{name}", name} & COUNTERS.keys()
    }
    assert not lacking, "say in proto/contracts_page.py what bounds them"
    assert {key.rpartition(".")[2] for key in COUNTERS} == {name for _, name in named}
    assert {f"{message}.{name}" for message, name in named} == {*FOUND, *ELSEWHERE}
    page = (REPOSITORY / "docs" / "contracts.md").read_text()
    assert all(f"| `{name}` | {most} |" in page for name, most in COUNTERS.items())


def with_value(place: str, value: int) -> Message:
    """The request with one of its counters."""
    request = type(REQUESTS[FOUND[place]])()
    request.CopyFrom(REQUESTS[FOUND[place]])
    message, _, name = place.partition(".")
    held: Any = next(held for held in holders(request) if held.DESCRIPTOR.name == message)
    field = held.DESCRIPTOR.fields_by_name[name]
    if field.message_type is not None:
        getattr(held, name)["solver"] = value
    else:
        setattr(held, name, min(value, 2**32 - 1) if field.cpp_type == field.CPPTYPE_UINT32 else value)
    return request


@pytest.mark.parametrize("place", FOUND)
async def test_the_largest_values_of_a_counter_leave_the_run_usable(world: World, place: str) -> None:
    await world.started("t1", dataset="Counting")
    for value in (2**64 - 1, 2**53 + 1, 2**53, 2**53 - 1):
        with suppress(AstraflowError):
            await answer(world, with_value(place, value), timeout_s=5.0)
    await works(world)


async def works(world: World) -> None:
    """A trainer and a node do what they do in any run."""
    trainer, other = await world.trainer(), await world.trainer()
    assert trainer.epoch < other.epoch < 100, "epochs go on from those given out, and one fences the other"
    claim = await other.claim()
    step, version = claim.last_finished_step + 1, claim.version
    assert step < 10
    assert version < 10
    await (await world.node("n2")).make_ready(2)
    await other.train(step, base_version=version)
    await other.publish(version=version + 1, step=step)
    await world.has_account()


async def test_versions_that_nobody_can_read_raise_no_number_beyond_the_steps_taken(world: World) -> None:
    trainer, _ = await world.started(dataset="Counting")
    most = 2_097_151
    with pytest.raises(InvalidArgumentError, match="it has finished 0 steps; count those that the log"):
        await trainer.publish(version=most, step=1, rollback_of=0, num_unreadable_before=most)
    await works(world)


async def test_a_claim_goes_on_above_what_a_redis_may_lack_and_not_above_what_it_gave_out(
    world: World,
) -> None:
    trainer, _ = await world.started()
    assert (await trainer.claim(known_epoch=65)).trainer_epoch == 66
    with pytest.raises(
        InvalidArgumentError, match="epoch 131 of solver was never given out: the newest is 66"
    ):
        await trainer.claim(known_epoch=131)
    with pytest.raises(
        PermissionError_, match="held_epoch 131 of solver is claimed again with the credential"
    ):
        await trainer.claim(held_epoch=131)
    await world.dataflow.connection.replace_incarnation(await world.dataflow.connection.data_incarnation())
    assert (await trainer.claim(known_epoch=5000)).trainer_epoch == 5001
    with pytest.raises(InvalidArgumentError, match="epoch 5066"):
        await trainer.claim(known_epoch=5066)


async def test_an_incarnation_that_was_not_given_out_fences_nobody(world: World) -> None:
    await world.started()
    for number in (2**64 - 1, 2**53 + 1, 2**53, 2**53 - 1, 2):
        with pytest.raises(AstraflowError):
            await world.join("n9", incarnation=number, max_concurrent_tasks=1)
    await world.node("n9")
