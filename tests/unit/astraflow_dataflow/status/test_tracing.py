"""A task's life is told from its entries alone."""

from typing import Any

import pytest

from astraflow.dataflow.v1 import trace_pb2
from astraflow_dataflow.records import StoredTrace
from astraflow_dataflow.status.tracing import MAX_ENTRIES, note_published, task_trace, trained_steps

PLACE = trace_pb2.TrajectoryPlace


def stored(*entries: str, **changes: Any) -> StoredTrace:
    """What Redis kept of a task that is done."""
    facts = {"state": "done", "attempt": 1, "group_size": 2, "missing": 0, "lane": "", "why": ""}
    facts |= {"known": True, "refused_by": ("n9",), "deadline_ms": 0}
    return StoredTrace(task_id="t1", entries=entries, **(facts | changes))


def episode(*names: str, outcome: str = "ACCEPTED", reason: str = "", policies: str = "p") -> str:
    """Episodes pushed together, each with a trajectory per policy."""
    episodes = "\n".join(f"{member}\t{name}" for member, name in enumerate(names))
    items = [f"{name}.{policy}\t{policy}\t\t3\t4\t0.5" for name in names for policy in policies.split()]
    return f"E\t2000\t1\tn1\t{outcome}\t0\t{reason}\n{episodes}\n\n" + "\n".join(items)


def places(trace: trace_pb2.TaskTrace) -> list[tuple[str, str]]:
    """(place, drop reason) of each trajectory."""
    return [(PLACE.Name(item.place)[17:], item.drop_reason) for item in trace.trajectories]


def test_a_running_lease_has_a_deadline_and_one_that_ended_an_outcome() -> None:
    entries = ["Q\t1000\ttrain", "L\t1500\t1\tn1"]
    live = task_trace(stored(*entries, state="leased", deadline_ms=9000, lane="train")).leases[0]
    assert (live.lease_id, live.deadline_time.ToMilliseconds(), live.outcome) == ("t1#1", 9000, "")
    ended = task_trace(stored(*entries, "l\t1700\t1\tlease_expired")).leases[0]
    assert (ended.end_time.ToMilliseconds(), ended.outcome) == (1700, "lease_expired")
    assert not ended.HasField("deadline_time")


def test_a_second_copy_has_a_lease_of_its_own() -> None:
    entries = ["Q\t1000\ttrain", "L\t1500\t3\tn1", "H\t1600\t3\tn2", "h\t1700\t3\tcompleted"]
    first, copy = task_trace(stored(*entries)).leases
    assert (first.lease_id, first.node_id, first.outcome) == ("t1#3", "n1", "")
    assert (copy.lease_id, copy.attempt, copy.node_id, copy.outcome) == ("t1#3-h", 3, "n2", "completed")


def test_episodes_pushed_together_have_their_own_trajectories() -> None:
    trace = task_trace(stored("Q\t1\ttrain", episode("a", "b", policies="p q"), state="leased"))
    assert [(one.episode_id, one.member, one.outcome) for one in trace.episodes] == [
        ("a", 0, "ACCEPTED"),
        ("b", 1, "ACCEPTED"),
    ]
    assert [(item.episode_id, item.trajectory_id) for item in trace.trajectories] == [
        ("a", "a.p"),
        ("a", "a.q"),
        ("b", "b.p"),
        ("b", "b.q"),
    ]


def test_an_episode_without_trajectories_and_its_calls_of_tools_are_read() -> None:
    (one,) = task_trace(stored("E\t2000\t1\tn1\tACCEPTED\t1\t\n3\ta\t2,1\n\n")).episodes
    assert (one.episode_id, one.member, one.failed, one.node_id) == ("a", 3, True, "n1")


@pytest.mark.parametrize("node", ["n\t1", "n\n1"])
@pytest.mark.parametrize("name", ["a", "a\nb"])
def test_poison_with_a_separator_in_an_id_is_passed_over(node: str, name: str) -> None:
    entries = [f"E\t2000\t1\t{node}\tPOISON\t0\tbad_id\n0\t{name}\n\n", episode("good")]
    assert [one.episode_id for one in task_trace(stored(*entries)).episodes] == ["good"]


def test_the_groups_of_two_policies_go_their_own_ways() -> None:
    entries = ["Q\t1\ttrain", episode("e", policies="p q"), "G\t3\tt1/p\tready", "G\t3\tt1/q\tno_credit"]
    assert places(task_trace(stored(*entries))) == [("READY", ""), ("DROPPED", "no_credit")]
    entries += ["B\t4\tt1/p\tp-7-1\t7", "A\t5\tt1/p\ttrained"]
    trace = task_trace(stored(*entries))
    assert places(trace)[0] == ("TRAINED", "")
    assert trained_steps(trace) == {"p": [7]}
    note_published(trace, "p", {7: 6})
    first, second = trace.trajectories
    assert (first.batch_id, first.step, first.published_version) == ("p-7-1", 7, 6)
    assert (first.place_time.ToMilliseconds(), second.HasField("published_version")) == (5, False)


def test_a_batch_given_back_makes_ready_and_a_skipped_step_drops() -> None:
    entries = ["Q\t1\ttrain", episode("e"), "G\t3\tt1/p\tready", "B\t4\tt1/p\tb1\t1", "R\t5\tt1/p\tnacked"]
    trace = task_trace(stored(*entries))
    assert (places(trace), trace.trajectories[0].batch_id) == ([("READY", "")], "")
    entries += ["B\t6\tt1/p\tb2\t1", "A\t7\tt1/p\tskipped"]
    assert places(task_trace(stored(*entries))) == [("DROPPED", "skipped")]
    voided = [*entries[:4], "D\t8\tt1/p\tvoided"]
    assert places(task_trace(stored(*voided))) == [("DROPPED", "voided")]


def test_a_refused_episode_drops_its_own_trajectories_only() -> None:
    entries = ["Q\t1\ttrain", episode("a"), episode("b", outcome="SUPERSEDED", reason="superseded")]
    trace = task_trace(stored(*entries, state="leased"))
    assert places(trace) == [("ASSEMBLING", ""), ("DROPPED", "superseded")]


def test_what_came_before_a_requeue_keeps_its_end() -> None:
    entries = ["Q\t1\ttrain", episode("a"), "G\t3\tt1/p\tincomplete", "X\t4"]
    entries += [episode("b"), "G\t6\tt1/p\tready"]
    assert places(task_trace(stored(*entries))) == [("DROPPED", "incomplete"), ("READY", "")]


def test_an_evaluations_trajectories_are_evaluated() -> None:
    trace = task_trace(stored("Q\t1\tp:0:final", episode("a")))
    assert (trace.lane, places(trace)) == ("p:0:final", [("EVALUATED", "")])


def test_a_history_that_is_not_whole_says_so() -> None:
    assert task_trace(stored()).truncated
    assert not task_trace(stored(state="queued")).truncated
    assert task_trace(stored(*["C\t1\texpired"] * MAX_ENTRIES)).truncated


def test_a_forgotten_task_is_only_an_id() -> None:
    assert task_trace(stored(state="")).state == trace_pb2.TASK_STATE_FORGOTTEN
