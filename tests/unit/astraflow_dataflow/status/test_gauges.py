"""The metrics page of a run says what its snapshot says, keeps nothing that is over, and has no unbounded label."""

import re
from dataclasses import replace

from astraflow.dataflow.v1 import admin_service_pb2, version_pb2
from astraflow.dataflow.v1.account_pb2 import TrajectoryAccount
from astraflow_dataflow.rules.waits import Wait
from astraflow_dataflow.status.gauges import RunGauges
from astraflow_kit.metric_schema import SCHEMA
from astraflow_kit.metrics import Metrics
from support.dataflow_snapshots import POLICY, node


def shown(metrics: Metrics, name: str) -> dict[str, float]:
    """The series of a gauge of the run `r`, by their further labels' values, joined."""
    lines = re.findall(rf"^astraflow_dataflow_{name}{{(.*)}} (\S+)$", metrics.render().decode(), re.MULTILINE)
    found = {}
    for labels, value in lines:
        named = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        assert named.pop("run") == "r"
        found[
            "/".join(named[label] for label in SCHEMA[f"astraflow_dataflow_{name}"].labels if label != "run")
        ] = float(value)
    return found


def test_trajectories_and_policies_are_those_of_the_audit() -> None:
    gauges = RunGauges(Metrics(), "r")
    account = TrajectoryAccount(ingested=9, trained=4, ready=3, dropped={"stale": 2})
    policy = replace(POLICY, version=7, ready=3, outstanding=2, acceptance=0.5, staleness={0: 3, 2: 1})
    gauges.account([policy], account)
    places = shown(gauges.metrics, "trajectories")
    assert (places["ingested"], places["trained"], places["ready"], places["dropped_stale"]) == (9, 4, 3, 2)
    assert shown(gauges.metrics, "version") == {"p": 7}
    assert shown(gauges.metrics, "ready_groups") == {"p": 3}
    assert shown(gauges.metrics, "outstanding_groups") == {"p": 2}
    assert shown(gauges.metrics, "acceptance") == {"p": 0.5}
    assert shown(gauges.metrics, "staleness_versions")["p/max"] == 2


def test_a_wait_is_shown_in_seconds_and_leaves_with_its_end() -> None:
    gauges = RunGauges(Metrics(), "r")
    starved = Wait(stage="batch", reason="ready_groups", detail="", released_by="", policy_id="p")
    gauges.waits([(starved, 1500)])
    assert shown(gauges.metrics, "wait_seconds") == {"p/batch/ready_groups": 1.5}
    gauges.waits([])
    assert shown(gauges.metrics, "wait_seconds") == {}


def test_the_verdict_of_a_policy_is_one_and_leaves_with_the_next() -> None:
    gauges = RunGauges(Metrics(), "r")
    gauges.balances([admin_service_pb2.Balance(policy_id="p", verdict="rollout_bound")])
    assert shown(gauges.metrics, "balance") == {"p/rollout_bound": 1}
    gauges.balances([admin_service_pb2.Balance(policy_id="p", verdict="balanced")])
    assert shown(gauges.metrics, "balance") == {"p/balanced": 1}


def test_the_lag_is_that_of_the_last_connected_node() -> None:
    gauges = RunGauges(Metrics(), "r")
    version = version_pb2.Version(policy_id="p", version=9, delta_bytes=10, snapshot_bytes=400, density=0.02)
    gauges.fleet([node(version_lags={"p": 1}), node(node_id="m", version_lags={"p": 3, "q": 8})], [version])
    assert shown(gauges.metrics, "version_lag") == {"p": 3}
    assert shown(gauges.metrics, "version_bytes") == {"p/delta": 10, "p/snapshot": 400}
    assert shown(gauges.metrics, "version_density") == {"p": 0.02}
    assert shown(gauges.metrics, "nodes_connected") == {"": 2}
    gauges.fleet([], [version])
    assert shown(gauges.metrics, "version_lag") == {"p": 0}


def test_no_label_is_an_id_of_which_there_are_ever_more() -> None:
    labels = {label for metric in SCHEMA.values() for label in metric.labels}
    assert not labels & {
        "node",
        "task",
        "task_id",
        "episode",
        "episode_id",
        "trajectory",
        "batch",
        "step",
        "lease",
    }
