"""Integers of requests: those that a double holds pass, others are named, wherever in a request they are."""

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from astraflow.dataflow.v1 import admin_service_pb2 as admin
from astraflow.dataflow.v1 import batch_service_pb2 as batches
from astraflow.dataflow.v1 import run_service_pb2 as runs
from astraflow.dataflow.v1 import task_service_pb2 as tasks
from astraflow.dataflow.v1 import trajectory_service_pb2 as pushes
from astraflow.errors import InvalidArgumentError
from astraflow.rollout.v1 import task_pb2, trajectory_pb2
from astraflow_kit.bounds import MAX_INTEGER, require_bounds

LARGEST = 2**64 - 1
PASSING: list[Message] = [
    batches.ClaimPolicyRequest(known_epoch=MAX_INTEGER),
    tasks.LeaseTasksRequest(serving_versions={"solver": MAX_INTEGER}, incarnation=LARGEST),
    tasks.SubmitTasksRequest(tasks=[task_pb2.Task(group_size=1)]),
    task_pb2.Lease(seed=LARGEST),
    runs.JoinRunRequest(incarnation=LARGEST),
    batches.AcquireBatchRequest(wait_duration=Duration(seconds=-315_576_000_000)),
]
REFUSED: dict[str, Message] = {
    "ClaimPolicyRequest.known_epoch": batches.ClaimPolicyRequest(known_epoch=MAX_INTEGER + 1),
    "LeaseTasksRequest.serving_versions[solver]": tasks.LeaseTasksRequest(
        serving_versions={"solver": LARGEST}
    ),
    "LeaseTasksResponse.leases[1].required_versions[solver]": tasks.LeaseTasksResponse(
        leases=[task_pb2.Lease(), task_pb2.Lease(required_versions={"solver": LARGEST})]
    ),
    "WorkRequest.credits.leases_received": tasks.WorkRequest(credits=tasks.Credits(leases_received=LARGEST)),
    "AcquireBatchRequest.wait_duration.seconds": batches.AcquireBatchRequest(
        wait_duration=Duration(seconds=-(2**40))
    ),
    "RevokeTokenRequest.token.expire_time.seconds": admin.RevokeTokenRequest(
        token=admin.RevokedToken(expire_time=Timestamp(seconds=2**63 - 1))
    ),
}


@pytest.mark.parametrize("request_", PASSING, ids=lambda request: type(request).__name__)
def test_what_a_double_holds_and_what_nobody_computes_with_passes(request_: Message) -> None:
    require_bounds(request_)


IDS: dict[str, Message] = {
    "PushEpisodeRequest.episode.node_id is 'n\\n1'": pushes.PushEpisodeRequest(
        episode=trajectory_pb2.Episode(node_id="n\n1")
    ),
    "ClaimPolicyRequest.trainer_id is 'a\\tb'": batches.ClaimPolicyRequest(trainer_id="a\tb"),
    "RenewLeasesRequest.lease_ids[1] is 'a\\u2028'": tasks.RenewLeasesRequest(lease_ids=["a", "a\u2028"]),
    "WhyRequest.task_id has 257 characters, at most 256": admin.WhyRequest(task_id="x" * 257),
}


@pytest.mark.parametrize("words", IDS)
def test_an_id_that_separates_lines_or_has_no_end_is_refused(words: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        require_bounds(IDS[words])
    assert refused.value.message.startswith(words)


@pytest.mark.parametrize("field", REFUSED)
def test_what_no_double_holds_is_refused_with_field_value_and_bound(field: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        require_bounds(REFUSED[field])
    assert refused.value.message.startswith(f"{field} is ")
    assert ", at most " in refused.value.message
