"""A change of status is named, and time that passes is none."""

import math

from astraflow.dataflow.v1 import account_pb2, admin_service_pb2
from astraflow_dataflow.status.watching import changed_fields, timeless


def status(**fields: object) -> admin_service_pb2.StatusResponse:
    """A status with a node, a wait and a mean of nothing."""
    message = admin_service_pb2.StatusResponse(run_id="run", **fields)  # type: ignore[arg-type]
    message.nodes.add(node_id="n").last_seen_time.FromMilliseconds(5)
    message.waits.add(reason="no_node").waited_duration.FromMilliseconds(7)
    message.policies.add(policy_id="p", recent_training_reward=math.nan)
    return message


def test_time_that_passes_is_no_change() -> None:
    later = status()
    later.nodes[0].last_seen_time.FromMilliseconds(500)
    later.waits[0].waited_duration.FromMilliseconds(700)
    assert changed_fields(timeless(status()), timeless(later)) == []


def test_changes_are_named_in_the_contracts_order() -> None:
    now = status(dead_letters=1, trajectories=account_pb2.TrajectoryAccount(ingested=3))
    assert changed_fields(timeless(status()), timeless(now)) == ["trajectories", "dead_letters"]


def test_the_first_message_names_all_that_is_set() -> None:
    nothing = admin_service_pb2.StatusResponse()
    assert changed_fields(nothing, timeless(status())) == ["run_id", "policies", "nodes", "waits"]
