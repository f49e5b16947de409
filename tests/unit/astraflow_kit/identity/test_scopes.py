"""A request speaks only of what its token is for, wherever its message names it."""

import pytest
from google.protobuf.message import Message

from astraflow.dataflow.v1 import batch_service_pb2 as batches
from astraflow.dataflow.v1 import run_pb2, version_pb2
from astraflow.dataflow.v1 import run_service_pb2 as runs
from astraflow.dataflow.v1 import task_service_pb2 as tasks
from astraflow.dataflow.v1 import trajectory_service_pb2 as pushes
from astraflow.dataflow.v1 import version_service_pb2 as versions
from astraflow.rollout.v1 import trajectory_pb2
from astraflow_kit.identity.scopes import Overreach, fields_of, narrow
from astraflow_kit.identity.tokens import Identity

ONE = Identity(
    subject="one",
    roles=frozenset({"rollout"}),
    runs=frozenset({"mine"}),
    pools=frozenset({"spot"}),
    policies=frozenset({"solver"}),
)
TWO = Identity(subject="two", roles=frozenset({"operator"}), runs=frozenset({"a", "b"}))
NOBODY = Identity(subject="none", roles=frozenset({"viewer"}), runs=frozenset(), policies=frozenset())


def episode(run_id: str, *policy_ids: str) -> trajectory_pb2.Episode:
    headers = [trajectory_pb2.TrajectoryHeader(policy_id=policy_id) for policy_id in policy_ids]
    items = [trajectory_pb2.TrajectoryItem(header=header) for header in headers]
    return trajectory_pb2.Episode(run_id=run_id, trajectories=items)


OVERREACHES: list[tuple[Message, str, str]] = [
    (runs.GetRunRequest(run_id="theirs"), "run", "theirs"),
    (runs.CreateRunRequest(run=run_pb2.Run(run_id="theirs")), "run", "theirs"),
    (tasks.WorkRequest(hello=tasks.Hello(run_id="theirs")), "run", "theirs"),
    (pushes.PushRequest(episodes=[episode("theirs")]), "run", "theirs"),
    (pushes.PushRequest(episodes=[episode("mine"), episode("theirs")]), "run", "theirs"),
    (pushes.PushEpisodeRequest(episode=episode("mine", "solver", "critic")), "policy", "critic"),
    (runs.JoinRunRequest(run_id="mine", pool="reserved"), "pool", "reserved"),
    (batches.ClaimPolicyRequest(run_id="mine", policy_id="critic"), "policy", "critic"),
    (versions.PublishRequest(version=version_pb2.Version(policy_id="critic")), "policy", "critic"),
    (versions.WatchRequest(run_id="mine", policy_ids=["solver", "critic"]), "policy", "critic"),
]


@pytest.mark.parametrize(("request_", "kind", "name"), OVERREACHES)
def test_what_the_token_is_not_for_is_found(request_: Message, kind: str, name: str) -> None:
    found = narrow(request_, ONE)
    assert found is not None
    assert (found.kind, found.name) == (kind, name)


def test_the_only_one_is_the_tokens_only_one() -> None:
    joins = runs.JoinRunRequest()
    assert narrow(joins, ONE) is None
    assert (joins.run_id, joins.pool) == ("mine", "spot")
    watch = versions.WatchRequest()
    assert narrow(watch, ONE) is None
    assert list(watch.policy_ids) == ["solver"]


def test_who_may_speak_of_several_must_name_one() -> None:
    assert narrow(runs.GetRunRequest(), TWO) == Overreach("run", "", frozenset({"a", "b"}))
    assert narrow(runs.GetRunRequest(run_id="b"), TWO) is None


def test_a_token_for_nothing_gets_nothing() -> None:
    assert narrow(runs.GetRunRequest(), NOBODY) is not None
    assert narrow(versions.WatchRequest(run_id="x"), NOBODY) is not None


def test_a_message_that_is_not_set_names_nothing() -> None:
    assert narrow(tasks.WorkRequest(renewal=tasks.Renewal(lease_ids=["l"])), ONE) is None


def test_fields_are_found_where_messages_hold_them() -> None:
    paths = fields_of(pushes.PushRequest.DESCRIPTOR, "run_id")
    assert [[field.name for field in path] for path in paths] == [["episodes", "run_id"]]
