"""No caller sets a counter: of each field that names one, the largest values that there are leave the run usable."""

import re
import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from astraflow.dataflow.v1 import admin_service_pb2 as admin
from astraflow.dataflow.v1 import batch_pb2, run_pb2, version_pb2
from astraflow.dataflow.v1 import batch_service_pb2 as batches
from astraflow.dataflow.v1 import evaluation_service_pb2 as evaluations
from astraflow.dataflow.v1 import run_service_pb2 as runs
from astraflow.dataflow.v1 import sample_service_pb2 as samples
from astraflow.dataflow.v1 import task_service_pb2 as tasks
from astraflow.dataflow.v1 import trajectory_service_pb2 as trajectories
from astraflow.dataflow.v1 import version_service_pb2 as versions
from astraflow.errors import AstraflowError, InvalidArgumentError, PermissionError_
from astraflow.options.v1 import options_pb2
from astraflow.raas.v1 import environment_service_pb2 as environments
from astraflow.rollout.v1 import trajectory_pb2
from astraflow.trainer.v1 import trainer_service_pb2 as trainers
from support.any_rpc import INVALID, MISSING, STATE, answer, request_of
from support.dataflow_world import Node, World, make_episode, outcome_name, recipe_text
from support.source_tree import REPOSITORY

sys.path.append(str(REPOSITORY / "proto"))
from contracts_page import COUNTERS

pytestmark = pytest.mark.slow

INTEGERS = {FieldDescriptor.CPPTYPE_UINT64, FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_INT64}
NAMES_ONE = re.compile(
    "epoch|steps?$|_step$|version|incarnation|sequence|attempt|turn$|received|unreadable|draws|number$|rollback_of|sampled|restarts"
)
OWN = {"TrajectoryHeader.turn"}
"""What the server sets itself, and replaces where a client says it."""
STEP = {"step": 2, "batch_id": "b", "digest": b"."}
"""Of the batch that is bound, whose id and digest are filled in."""
VERSION = version_pb2.Version(
    policy_id="solver", version=1, step=1, manifest_sha256=b"." * 32, trainer_epoch=1
)
RECIPE: dict[str, Any] = {"dataset": "Counting", "max_staleness": 8}
RUN = run_pb2.Run(
    run_id="run",
    recipe_yaml=recipe_text(**RECIPE),
    store_uri="file:///nowhere",
    switches=[run_pb2.PluginSwitch()],
)
REQUESTS: list[Message] = [
    request_of(batches.ClaimPolicyRequest, trainer_id="t"),
    request_of(
        batches.ClaimPolicyRequest, trainer_id="t", accepted_loss=batches.AcceptedLoss(identity="0" * 32)
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
        )
    ),
    request_of(batches.MarkDurableRequest, step=1),
    request_of(batches.AckBatchRequest, stage=batches.BATCH_STAGE_INTENT, **STEP),
    request_of(batches.VoidBatchRequest, action=batches.VOID_ACTION_DISCARD, step=2, batch_id="b"),
    request_of(versions.PublishRequest, version=VERSION),
    request_of(versions.PinVersionRequest),
    request_of(versions.UnpinVersionRequest),
    request_of(evaluations.RequestEvaluationRequest, evaluation_id="mine", versions={"solver": 0}),
    request_of(runs.JoinRunRequest, node_id="n9", max_concurrent_tasks=1),
    runs.CreateRunRequest(run=RUN),
    request_of(tasks.LeaseTasksRequest, max_tasks=1, serving_versions={"solver": 0}),
    tasks.WorkRequest(hello=tasks.Hello(run_id="run", node_id="n1")),
    tasks.WorkRequest(
        credits=tasks.Credits(
            weight_faults=[version_pb2.WeightFault(policy_id="solver")], serving_versions={}
        )
    ),
    trajectories.PushRequest(sequence=1, episodes=[make_episode(run_id="run", task_id="mine", member=0)]),
    request_of(admin.ListStepsRequest),
]
EPOCHS = [
    f"{name}Request" for name in ("AckBatch", "AcquireBatch", "FetchBatch", "HoldPolicy", "MarkDurable")
]
EPOCHS += [f"{name}Request" for name in ("NackBatch", "Publish", "ReleasePolicy", "RenewBatch")]
KEPT = [
    f"Credits.{name}" for name in ("serving_versions", "tokens_sampled", "engine_restarts", "leases_received")
]
KEPT += ["LeaseTasksRequest.serving_versions", "WeightFault.version", "Version.sequence"]
KEPT += [
    "PluginSwitch.number",
    "PluginSwitch.steps",
    "ListStepsRequest.min_step",
    "ListStepsRequest.max_step",
]
KEPT += ["AcquireBatchRequest.base_version", "NackBatchRequest.step", "UnpinVersionRequest.version"]
KEPT += ["ClaimPolicyRequest.last_step"]
"""What raises nothing: it is ignored, read, waited for, names what is not there, or is about the caller alone."""
ELSEWHERE = {
    "ResetRequest.holder_incarnation": environments.ResetRequest,
    "StepRequest.turn": environments.StepRequest,
    "WatchMetricsRequest.after_step": trainers.WatchMetricsRequest,
    "VersionSpan.version": trajectory_pb2.VersionSpan,
    **{
        f"ListSamplesRequest.{name}": samples.ListSamplesRequest
        for name in ("min_step", "max_step", "version")
    },
}
"""Fields of other services, of the body of a trajectory, and of an archive; their own tests try those."""
NOTHING, ITS_BOUND = -1, None
DENIED = "PERMISSION_DENIED wrong_session"
LARGEST: dict[str, tuple[int | None, str]] = {
    **{f"{name}.trainer_epoch": (1, DENIED) for name in EPOCHS},
    **{f"{name}.incarnation": (1, DENIED) for name in ("LeaseTasksRequest", "Hello")},
    **dict.fromkeys(KEPT, (ITS_BOUND, "")),
    "ClaimPolicyRequest.known_epoch": (65, INVALID),
    "ClaimPolicyRequest.held_epoch": (0, DENIED),
    "AcceptedLoss.step": (NOTHING, STATE),
    "AcquireBatchRequest.step": (2, INVALID),
    "FetchBatchRequest.step": (2, MISSING),
    "RenewBatchRequest.step": (2, MISSING),
    "MarkDurableRequest.step": (1, INVALID),
    "AckBatchRequest.step": (2, MISSING),
    "VoidBatchRequest.step": (2, MISSING),
    "PublishRequest.num_unreadable_before": (65, INVALID),
    "Version.version": (1, "VERSION_GAP"),
    "Version.step": (1, INVALID),
    "Version.trainer_epoch": (1, INVALID),
    "Version.rollback_of": (0, INVALID),
    "Version.snapshot_version": (0, INVALID),
    "PinVersionRequest.version": (0, MISSING),
    "RequestEvaluationRequest.versions": (0, STATE),
    "JoinRunRequest.incarnation": (0, DENIED),
    "PushRequest.sequence": (1, INVALID),
    "Episode.attempt": (1, "REFUSED unknown_attempt"),
    "Episode.draws": (ITS_BOUND, "POISON too_many_draws"),
    "TrajectoryHeader.min_version": (0, "POISON version_mismatch"),
    "TrajectoryHeader.max_version": (0, "RETRY UNKNOWN_VERSION, POISON future_version"),
}
"""The largest value of each that `begun` takes, and how it refuses what is above: by whichever of these."""


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
    for number, request in reversed(list(enumerate(REQUESTS)))
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


def holder_of(request: Message, place: str) -> tuple[Any, FieldDescriptor]:
    """The message of a request that has a counter, and the counter's field."""
    message, _, name = place.partition(".")
    held = next(held for held in holders(request) if held.DESCRIPTOR.name == message)
    return held, held.DESCRIPTOR.fields_by_name[name]


def own_bound(place: str) -> int:
    """The largest value that the contract lets through."""
    _, field = holder_of(REQUESTS[FOUND[place]], place)
    bounds = field.GetOptions().Extensions[options_pb2.bounds]
    narrow = 2**32 - 1 if field.cpp_type == field.CPPTYPE_UINT32 else 2**53
    return int(bounds.max) if bounds.HasField("max") else narrow


@dataclass
class Begun:
    """A run with one finished step, whose version is not announced, and one that is bound."""

    world: World
    node: Node
    batch: batch_pb2.Batch

    async def said_to(self, place: str, value: int) -> str:
        """What is answered to a request with this value: nothing where it is taken, else how it is refused."""
        request = type(REQUESTS[FOUND[place]])()
        request.CopyFrom(REQUESTS[FOUND[place]])
        held, field = holder_of(request, place)
        if field.message_type is not None:
            getattr(held, field.name)["solver"] = value
        else:
            setattr(held, field.name, value)
        for message in holders(request):
            await self._complete(message)
        try:
            answered = await answer(self.world, request, timeout_s=5.0)
        except AstraflowError as error:
            return f"{error.reason} {error.metadata.get('reason', '')}".strip()
        if not isinstance(answered, trajectories.PushResponse):
            return ""
        outcome = outcome_name(answered.results[0])
        return "" if outcome == "ACCEPTED" else f"{outcome} {answered.results[0].reason}"

    async def _complete(self, message: Any) -> None:
        """Fill in what the bound batch, or a new lease, is called."""
        known = message.DESCRIPTOR.fields_by_name
        if "batch_id" in known and message.batch_id:
            message.batch_id = self.batch.batch_id
        if "digest" in known and message.digest:
            message.digest = self.batch.digest
        if isinstance(message, trajectory_pb2.Episode):
            await self.world.submit(f"mine-{secrets.token_hex(4)}")
            (lease,) = await self.node.lease()
            message.task_id, message.lease_id = lease.task.task_id, lease.lease_id


@pytest.fixture
async def begun(world: World) -> Begun:
    trainer, node = await world.started(**RECIPE)
    await node.make_ready(4)
    await trainer.ack((await trainer.acquire(1)).batch, batches.BATCH_STAGE_TRAINED)
    return Begun(world, node, (await trainer.acquire(2, base_version=1)).batch)


def test_every_counter_is_tried_with_what_was_given_out() -> None:
    assert LARGEST.keys() == FOUND.keys()


@pytest.mark.parametrize("place", FOUND)
async def test_no_more_than_was_given_out_is_taken_and_the_run_stays_usable(begun: Begun, place: str) -> None:
    bound = own_bound(place)
    largest, refusals = LARGEST[place]
    most = bound if largest is None else largest
    fits = 2**32 if bound == 2**32 - 1 else 2**64
    tried = {most + 1, most + 100, bound, bound + 1, 2**53 - 1, 2**53, 2**53 + 1, 2**64 - 1}
    for value in sorted(value for value in tried if most < value < fits):
        allowed = [*refusals.split(", "), *([INVALID] if value > bound else [])]
        assert await begun.said_to(place, value) in allowed, f"{place} = {value}"
    if most >= 0:
        assert await begun.said_to(place, most) == "", f"{place} = {most}"
    await works(begun.world)


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
