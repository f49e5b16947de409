"""Bounds of fields: every field of every request has one, and a value outside is refused by name, cut, or judged."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from astraflow._contract.bounds import MAX_INTEGER, admit, judge, require_bounds
from astraflow._status import from_status, to_status
from astraflow.dataflow.v1 import admin_service_pb2 as admin
from astraflow.dataflow.v1 import batch_service_pb2 as batches
from astraflow.dataflow.v1 import run_service_pb2 as runs
from astraflow.dataflow.v1 import task_service_pb2 as tasks
from astraflow.dataflow.v1 import trajectory_service_pb2 as pushes
from astraflow.dataflow.v1 import version_service_pb2 as versions
from astraflow.errors import InvalidArgumentError
from astraflow.keda.v1 import external_scaler_pb2 as keda
from astraflow.options.v1 import options_pb2
from astraflow.raas.v1 import environment_service_pb2, node_service_pb2
from astraflow.rollout.v1 import engine_load_pb2, trajectory_pb2
from astraflow.trainer.v1 import trainer_service_pb2
from astraflow.trajectories import REASONS

CONTRACTS = (
    *(admin, batches, runs, tasks, pushes, versions, keda),
    *(environment_service_pb2, node_service_pb2, trainer_service_pb2),
)
LARGEST = 2**64 - 1
TIMES = ("google.protobuf.Duration", "google.protobuf.Timestamp")
ANY_VALUE = (FieldDescriptor.CPPTYPE_BOOL, FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32)
NUMBERS = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64, *ANY_VALUE[1:])
FIGURES = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)


def requests() -> Iterator[Descriptor]:
    """Whatever rpcs are sent, and what is in it; the body of a trajectory too."""
    waiting = [
        method.input_type
        for module in CONTRACTS
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]
    waiting.append(trajectory_pb2.Trajectory.DESCRIPTOR)
    seen: set[str] = set(TIMES)
    while waiting:
        message = waiting.pop()
        if message.full_name not in seen:
            seen.add(message.full_name)
            if not message.GetOptions().map_entry:
                yield message
            waiting += [field.message_type for field in message.fields if field.message_type is not None]


FIELDS = {field.full_name: field for message in requests() for field in message.fields}


def bounds_of(field: FieldDescriptor) -> options_pb2.Bounds:
    bounds: options_pb2.Bounds = field.GetOptions().Extensions[options_pb2.bounds]
    return bounds


def too_large(field: FieldDescriptor) -> list[Any]:
    """Values of one element of a field that no bound may take."""
    if field.type == FieldDescriptor.TYPE_STRING:
        lines = [] if bounds_of(field).multiline else ["a\nb", "\x00", "a\u2028"]
        return ["x" * 2_000_000, *lines]
    if field.type == FieldDescriptor.TYPE_BYTES:
        return [b"x" * 40_000_000]
    if field.enum_type is not None:
        return [99]
    if field.cpp_type in FIGURES:
        return [math.nan, math.inf, -math.inf]
    if field.cpp_type in NUMBERS:
        most = bounds_of(field).max or MAX_INTEGER
        largest = 2**32 - 1 if field.cpp_type in ANY_VALUE else LARGEST
        return [value for value in (int(most) + 1, largest) if most < value <= largest]
    return []


def with_value(field: FieldDescriptor, value: object, *, times: int = 1) -> Message:
    message: Any = message_factory.GetMessageClass(field.containing_type)()
    if field.is_repeated:
        getattr(message, field.name).extend([value] * times)
    else:
        setattr(message, field.name, value)
    return message


def outside(field: FieldDescriptor) -> Iterator[Message]:
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        of_value = entry.fields_by_name["value"].cpp_type
        message: Any = message_factory.GetMessageClass(field.containing_type)()
        getattr(message, field.name).update(
            {str(key): "" if of_value == FieldDescriptor.CPPTYPE_STRING else 1 for key in range(257)}
        )
        yield message
        return
    for value in too_large(field):
        yield with_value(field, value)
    if field.is_repeated:
        element = "" if field.type == FieldDescriptor.TYPE_STRING else 0
        if field.message_type is not None:
            element = message_factory.GetMessageClass(field.message_type)()
        yield with_value(field, element, times=(bounds_of(field).max_items or 1024) + 1)


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if not bounds_of(field).clamped])
def test_every_field_of_every_request_has_an_end(name: str) -> None:
    field = FIELDS[name]
    for message in outside(field):
        problem = judge(message, otherwise="any")
        assert problem is not None, f"{field.name} takes {str(message)[:80]}"
        assert problem[0] in {*REASONS, "any"}


def test_what_is_refused_has_field_value_and_limit_for_every_client() -> None:
    request = tasks.SubmitTasksRequest(tasks=[{"task_id": "a b"}])
    with pytest.raises(InvalidArgumentError) as refused:
        require_bounds(request)
    arrived = from_status(to_status(refused.value))
    assert arrived is not None
    assert arrived.message.startswith("SubmitTasksRequest.tasks[0].task_id is 'a b', which must match")
    assert arrived.metadata["field"] == "tasks[0].task_id"
    assert arrived.metadata["limit"] == "which must match [A-Za-z0-9._:-]{1,128}"
    names = [detail.TypeName() for detail in to_status(refused.value).details]
    assert names == ["google.rpc.ErrorInfo", "google.rpc.BadRequest"]


PASSING: list[Message] = [
    batches.ClaimPolicyRequest(known_epoch=MAX_INTEGER),
    tasks.LeaseTasksRequest(max_tasks=1, serving_versions={"solver": MAX_INTEGER}, incarnation=MAX_INTEGER),
    runs.JoinRunRequest(node_id="n1", incarnation=MAX_INTEGER, max_concurrent_tasks=1),
    batches.AcquireBatchRequest(step=1, wait_duration=Duration(seconds=30)),
    tasks.FailTaskRequest(failure=tasks.LeaseFailure(detail="two\nlines")),
    admin.RevokeTokenRequest(token={"token_id": "a", "expire_time": Timestamp(seconds=-1, nanos=1)}),
]


@pytest.mark.parametrize("request_", PASSING, ids=lambda request: type(request).__name__)
def test_what_a_double_holds_and_what_nobody_computes_with_passes(request_: Message) -> None:
    require_bounds(request_)


REFUSED: dict[str, Message] = {
    "WorkRequest.credits.leases_received is 18446744073709551615, at most 9007199254740992": tasks.WorkRequest(
        credits=tasks.Credits(leases_received=LARGEST)
    ),
    "LeaseTasksRequest.serving_versions[solver] is 184": tasks.LeaseTasksRequest(
        max_tasks=1, serving_versions={"solver": LARGEST}
    ),
    "AcquireBatchRequest.wait_duration.seconds is -1099511627776, ": batches.AcquireBatchRequest(
        step=1, wait_duration=Duration(seconds=-(2**40))
    ),
    "AcquireBatchRequest.wait_duration is 31 s, which must be 0 to 30 s; call": batches.AcquireBatchRequest(
        step=1, wait_duration=Duration(seconds=31)
    ),
    "RevokeTokenRequest.token.expire_time.seconds is": admin.RevokeTokenRequest(
        token=admin.RevokedToken(token_id="a", expire_time=Timestamp(seconds=2**63 - 1))
    ),
    "RevokeTokenRequest.token.expire_time.nanos is -1, which must be a part of a second": admin.RevokeTokenRequest(
        token=admin.RevokedToken(token_id="a", expire_time=Timestamp(nanos=-1))
    ),
    "ResetRequest.deadline_duration is 1e-09 s, which must be 1 to 600 s": environment_service_pb2.ResetRequest(
        session_id="s" * 32, deadline_duration=Duration(nanos=1)
    ),
    "PurgeDeadLettersRequest.dead_letter_ids[1] is '18446744073709551616-0'": admin.PurgeDeadLettersRequest(
        dead_letter_ids=["1-0", f"{2**64}-0"]
    ),
    "PushEpisodeRequest.episode.node_id is 'n\\n1'": pushes.PushEpisodeRequest(
        episode=trajectory_pb2.Episode(task_id="t", node_id="n\n1")
    ),
    "RenewLeasesRequest.lease_ids[1] is 'a\\u2028'": tasks.RenewLeasesRequest(lease_ids=["a", "a\u2028"]),
    "WhyRequest.task_id has 257 characters, at most 256": admin.WhyRequest(task_id="x" * 257),
    "FetchBatchRequest.trajectory_ids has 2 elements, 1 of them again": batches.FetchBatchRequest(
        step=1, trajectory_ids=["a", "a"]
    ),
    "CreateRunRequest.run is not set, but must be": runs.CreateRunRequest(),
    "AckBatchRequest.stage is BATCH_STAGE_UNSPECIFIED, which must be one of": batches.AckBatchRequest(step=1),
    "CreateRunRequest.run.code has ": runs.CreateRunRequest(
        run={
            "run_id": "a",
            "store_uri": "file:///a",
            "code": {"files": [{"path": f"a{i}.py", "content": b" " * 2**20} for i in range(2)]},
        }
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_outside_is_named_with_its_place_wherever_it_is(words: str) -> None:
    for check in (require_bounds, admit):
        with pytest.raises(InvalidArgumentError) as refused:
            check(REFUSED[words])
        assert refused.value.message.startswith(words)


def test_values_to_be_cut_are_brought_to_their_bounds_by_servers_and_left_alone_by_clients() -> None:
    load = engine_load_pb2.EngineLoad(
        running=math.nan, kv_usage=7.0, tokens_per_s=-1.0, fault="a\nb" + "x" * 300
    )
    request = tasks.WorkRequest(credits=tasks.Credits(engine_loads=[load] * 65))
    require_bounds(request)
    assert len(request.credits.engine_loads) == 65
    admit(request)
    assert len(request.credits.engine_loads) == 64
    kept = request.credits.engine_loads[0]
    assert (kept.running, kept.kv_usage, kept.tokens_per_s) == (0.0, 1.0, 0.0)
    assert kept.fault.startswith("a bx")
    assert len(kept.fault) == 256


def test_episodes_are_judged_apart_so_that_a_bad_one_ends_no_stream() -> None:
    header = trajectory_pb2.TrajectoryHeader(trajectory_id="a b", num_trainable_tokens=1)
    episode = trajectory_pb2.Episode(
        task_id="t",
        episode_id="e",
        status=trajectory_pb2.EPISODE_STATUS_FINISHED,
        trajectories=[{"header": header}],
    )
    admit(pushes.PushEpisodeRequest(episode=episode))
    problem = judge(episode)
    assert problem is not None
    assert problem[0] == "bad_id"
    assert problem[1].startswith("Episode.trajectories[0].header.trajectory_id is 'a b'")


@pytest.mark.parametrize(
    ("turn", "place"),
    [
        ({"reward": math.nan}, "turn_spans[2].reward is nan"),
        ({"reward": -math.inf}, "turn_spans[2].reward is -inf"),
        ({"role": "a\nb"}, "turn_spans[2].role is 'a\\nb'"),
        ({"role": "a" * 65}, "turn_spans[2].role has 65 characters"),
        ({"reward": 1e308}, ""),
        ({"role": "a\u00a0b"}, ""),
    ],
)
def test_elements_are_looked_at_all_at_once_and_the_one_outside_is_named(
    turn: dict[str, Any], place: str
) -> None:
    good = {"end": 1, "role": "solver", "reward": 1e308}
    body = trajectory_pb2.Trajectory(
        trajectory_id="t", token_ids=b"\0" * 4, turn_spans=[good, good, good | turn, good]
    )
    problem = judge(body, otherwise="out_of_bounds")
    assert problem[1].startswith(f"Trajectory.{place}") if problem else not place, problem


def test_fields_that_this_release_does_not_know_are_dropped() -> None:
    request = admin.WhyRequest.FromString(b"\x92\x3e\x05hello")
    assert request.ByteSize() == 8
    admit(request)
    assert request.ByteSize() == 0
