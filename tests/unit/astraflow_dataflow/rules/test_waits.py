"""What stages wait for, and since when."""

import dataclasses
from typing import Any

import pytest

from astraflow.dataflow.v1.admin_service_pb2 import NodeStatus
from astraflow.dataflow.v1.version_pb2 import WeightFault
from astraflow_dataflow.records import Audit, Life, Refused
from astraflow_dataflow.rules.faults import PluginFault
from astraflow_dataflow.rules.waits import current_waits
from support.dataflow_snapshots import AUDIT, EVALUATION, NODE, POLICY, node


def reasons(audit: Audit, *nodes: NodeStatus, evaluations: Any = (), **more: Any) -> list[tuple[str, str]]:
    """(stage, reason) of what waits."""
    return [(wait.stage, wait.reason) for wait in current_waits(audit, nodes, evaluations, **more)]


def fault(kind: str, *, name: str = "m:Name") -> PluginFault:
    """A plug-in that failed twice."""
    return PluginFault(kind, name, count=2, problem="it broke")


def with_policy(**changes: object) -> Audit:
    """The audit with a changed policy."""
    return dataclasses.replace(AUDIT, policies=(dataclasses.replace(POLICY, **changes),))  # type: ignore[arg-type]


def test_nothing_waits_when_all_flows() -> None:
    assert reasons(AUDIT, NODE) == []


def test_each_reason_has_its_name() -> None:
    gone = node(connected=False)
    empty = dataclasses.replace(AUDIT, queued_tasks=0)
    assert reasons(AUDIT, gone) == [("lease", "no_node")]
    assert reasons(with_policy(version=None), NODE) == [("lease", "no_version")]
    assert reasons(with_policy(credit=0), NODE) == [("lease", "staleness_window")]
    full = dataclasses.replace(AUDIT, leases=2, max_leases=2, admitted=0)
    assert reasons(full, NODE) == [("lease", "lease_quota")]
    assert reasons(AUDIT, node(connected=False, drain_reason="poison"), NODE) == [("lease", "node_poison")]
    assert reasons(dataclasses.replace(empty, exhausted=True), NODE) == [("lease", "dataset_exhausted")]
    assert reasons(empty, NODE, faults=[fault("dataset")]) == [("lease", "dataset_failed")]
    assert reasons(empty, NODE, skipped=1024) == [("lease", "tasks_skipped")]
    assert reasons(empty, NODE, skipped=1023) == []
    assert reasons(with_policy(epoch=0), NODE) == [("batch", "no_trainer")]
    assert reasons(with_policy(heard_ms=400), NODE, trainer_lease_s=0.5) == [("batch", "trainer_silent")]
    assert reasons(with_policy(heard_ms=500), NODE, trainer_lease_s=0.5) == []
    assert reasons(with_policy(heard_ms=0), NODE, trainer_lease_s=0.5) == [], "it was released"
    assert reasons(with_policy(no_credit=3, settled=100), NODE) == [("lease", "no_credit")]
    assert reasons(with_policy(no_credit=2, settled=100), NODE) == []
    assert reasons(with_policy(wait="ready_groups", wait_until_ms=1000), NODE) == [("batch", "ready_groups")]
    assert reasons(with_policy(wait="ready_groups", wait_until_ms=999), NODE) == []
    assert reasons(with_policy(wait="publish", wait_until_ms=1000), NODE) == [("publish", "publish")]
    unpublished = with_policy(finished_step=2, unpublished_steps=(2, 3))
    assert reasons(unpublished, NODE) == [("publish", "unpublished")]


def test_nodes_that_make_the_recipes_plugins_are_named_with_what_does_not_return() -> None:
    told = "recipe:Odd: its import has not returned for 31 s"
    making = node(waiting_for="plugin_start", waiting_detail=told)
    (wait,) = current_waits(AUDIT, [making], [])
    assert (wait.stage, wait.reason, wait.detail) == ("lease", "plugin_hung", f"{making.node_id}, {told}")
    assert reasons(AUDIT, node(connected=False, waiting_detail=told)) == [("lease", "no_node")]


@pytest.mark.parametrize(
    ("held", "detail", "release"),
    [
        ("batch", "3 groups outstanding, 1 of 2 ready", "the trainer binds the batch"),
        ("training verifier 7", "until step 7 of verifier has its version", "its trainer finishes the step"),
        ("ended", "its trainer has ended", "a trainer claims the policy"),
    ],
)
def test_a_barrier_says_what_it_waits_for(held: str, detail: str, release: str) -> None:
    audit = with_policy(credit=0, held=held, outstanding=3, ready=1, groups_per_step=2)
    (wait,) = [wait for wait in current_waits(audit, [NODE], []) if wait.stage == "lease"]
    assert wait.reason == "barrier"
    assert detail in wait.detail
    assert wait.released_by.startswith(release)


def test_a_run_that_does_not_train_waits_for_nodes_and_versions_only() -> None:
    untrained = with_policy(credit=0, epoch=0)
    assert reasons(untrained, NODE, trains=False) == []
    assert reasons(untrained, trains=False) == [("lease", "no_node")]
    assert reasons(with_policy(version=None, epoch=0), NODE, trains=False) == [("lease", "no_version")]


@pytest.mark.parametrize(
    ("heard_ms", "jumped_ms", "is_silent"),
    [
        (100, 800, False),  # the clock was set forward since
        (100, 400, True),  # and for longer than the lease ago
        (5_000_000, 800, False),  # set back
        (5_000_000, 400, True),
        (100, 0, True),
        (0, 100, False),  # it was released
    ],
)
def test_a_clock_that_is_set_makes_no_trainer_silent(heard_ms: int, jumped_ms: int, is_silent: bool) -> None:
    audit = dataclasses.replace(with_policy(heard_ms=heard_ms), now_ms=1000)
    found = reasons(audit, NODE, trainer_lease_s=0.5, clock_jumped_ms=jumped_ms)
    assert found == ([("batch", "trainer_silent")] if is_silent else [])


@pytest.mark.parametrize(
    ("policy", "release"),
    [
        ({"outstanding": 4}, "nodes finish the outstanding groups"),
        ({"outstanding": 3, "ready": 1}, "nodes finish the outstanding groups"),
        ({"ready": 2}, "the trainer takes a batch"),
        ({"unpublished": 2, "unpublished_steps": (1,)}, "the trainer finishes step 1"),
        (
            {"ready": 2, "unpublished_steps": (1, 2), "finished_step": 1},
            "the trainer announces the version of step 1",
        ),
    ],
)
def test_a_full_window_names_the_next_thing_that_leads_to_room(policy: dict[str, Any], release: str) -> None:
    waits = current_waits(with_policy(credit=0, **policy), [NODE], [])
    (full,) = [wait for wait in waits if wait.reason == "staleness_window"]
    assert full.released_by.startswith(release)


def test_an_evaluation_waits_while_no_connected_node_serves_its_version() -> None:
    elsewhere = node(serving_versions={"p": 1})
    assert reasons(AUDIT, NODE, evaluations=(EVALUATION,)) == []
    assert reasons(AUDIT, elsewhere, evaluations=(EVALUATION,)) == [("evaluate", "no_node_at_version")]


def test_a_finished_run_waits_for_nothing() -> None:
    assert reasons(dataclasses.replace(AUDIT, life=Life.FINISHED)) == []


def test_plugins_that_failed_are_named_one_of_each_kind() -> None:
    faults = [fault("filter", name="a:A"), fault("filter", name="b:B"), fault("selector"), fault("curator")]
    waits = current_waits(AUDIT, [NODE], [], faults=faults)
    assert [wait.reason for wait in waits] == ["curator_failed", "filter_failed", "selector_failed"]
    assert [wait.stage for wait in waits] == ["lease", "batch", "batch"]
    assert waits[1].detail == (
        "a:A failed 2 times, last: it broke (and 1 more of these); meanwhile groups it fails on are "
        "dropped as filter_failed"
    )


def test_tasks_that_every_connected_node_refused_wait_for_a_capable_one() -> None:
    refused = Refused(count=3, example="t7", since_ms=400)
    (wait,) = current_waits(AUDIT, [NODE], [], refused=refused)
    assert (wait.stage, wait.reason, wait.since_ms) == ("lease", "no_capable_node", 400)
    assert "t7" in wait.detail
    assert reasons(AUDIT, NODE, refused=Refused()) == []


def test_an_environment_that_did_not_answer_is_named_for_a_while() -> None:
    apart = node(environment_fault="no Game at 10.0.0.9:7100")
    now_ms = AUDIT.now_ms
    for age_ms, expected in ((29_000, [("lease", "environment_unavailable")]), (30_000, [])):
        apart.environment_fault_time.FromMilliseconds(now_ms - age_ms)
        assert reasons(AUDIT, apart) == expected


def test_a_policy_whose_bytes_a_node_cannot_verify_waits_to_be_activated() -> None:
    fault = WeightFault(policy_id="solver", version=5, tensor="w", tile=3, problem="its parts are damaged")
    faulty = [node(node_id=name, weight_faults=[fault]) for name in ("n1", "n2")]
    (wait,) = [wait for wait in current_waits(AUDIT, [*faulty, NODE], []) if wait.stage == "activate"]
    assert (wait.reason, wait.policy_id) == ("weight_fault", "solver")
    assert wait.detail == (
        "n1 cannot activate version 5, tensor 'w', tile 3: its parts are damaged (and 1 more)"
    )
    assert wait.released_by == "the damaged object is repaired; `astraflow weights verify 5` names it"


def test_a_node_whose_weight_store_is_away_waits_for_the_store() -> None:
    problem = "file:///mnt/runs is not mounted"
    faults = [
        WeightFault(policy_id="solver", version=5, problem=problem, waiting_for="store_missing"),
        WeightFault(policy_id="solver", version=5, problem="its parts are damaged"),
    ]
    apart = [node(node_id=f"n{number}", weight_faults=[fault]) for number, fault in enumerate(faults)]
    waits = [wait for wait in current_waits(AUDIT, apart, []) if wait.stage == "activate"]
    assert [(wait.reason, wait.policy_id) for wait in waits] == [
        ("store_missing", "solver"),
        ("weight_fault", "solver"),
    ]
    assert waits[0].detail == f"n0 cannot activate version 5: {problem}"
    assert (
        waits[0].released_by
        == "mount it, or bring its folder back (none is made); the node goes on by itself"
    )


def test_what_a_later_node_lacks_is_a_weight_fault() -> None:
    later = WeightFault(policy_id="solver", version=5, problem="?", waiting_for="store_asleep")
    assert ("activate", "weight_fault") in reasons(AUDIT, node(weight_faults=[later]))


def test_every_wait_says_what_would_release_it() -> None:
    refused = current_waits(AUDIT, [NODE], [EVALUATION], refused=Refused(count=1, example="t"))
    alone = current_waits(AUDIT, [], [])
    assert refused
    assert alone
    assert all(wait.released_by for wait in refused + alone)


def test_a_full_window_is_named_while_other_policies_go_on() -> None:
    full, other = dataclasses.replace(POLICY, credit=0), dataclasses.replace(POLICY, policy_id="q")
    (wait,) = current_waits(dataclasses.replace(AUDIT, policies=(full, other)), [NODE], [])
    assert (wait.policy_id, wait.reason) == ("p", "staleness_window")
    assert "for the other policies" in wait.detail


def test_a_policy_that_is_not_trained_waits_for_nothing_but_its_version() -> None:
    frozen = dataclasses.replace(POLICY, policy_id="judge", frozen=True, credit=0, epoch=0)
    both = dataclasses.replace(AUDIT, policies=(POLICY, frozen))
    assert reasons(both, NODE) == []
    (wait,) = current_waits(
        dataclasses.replace(both, policies=(POLICY, dataclasses.replace(frozen, version=None))), [NODE], []
    )
    assert "judge" in wait.detail
    assert "started again" in wait.released_by


def test_when_all_roles_need_credit_the_policies_without_are_named() -> None:
    full, other = dataclasses.replace(POLICY, credit=0), dataclasses.replace(POLICY, policy_id="q")
    audit = dataclasses.replace(AUDIT, policies=(full, other), admitted=0)
    (wait,) = current_waits(audit, [NODE], [])
    assert (wait.policy_id, "other policies" in wait.detail) == ("p", False)
