"""The tree of a task leads from leases to the version that came of it."""

from astraflow.commands.trace import trace_tree
from astraflow.dataflow.v1 import trace_pb2 as pb
from support.printed import printed


def task() -> pb.TaskTrace:
    """A task whose first lease ran out and whose second node finished it."""
    made = pb.TaskTrace(task_id="train-7", state=pb.TASK_STATE_DONE, lane="train", group_size=2)
    made.submit_time.FromSeconds(1000)
    for attempt, outcome, start_s, end_s in [(1, "lease_expired", 1001, 1021), (2, "completed", 1022, 1024)]:
        lease = made.leases.add(attempt=attempt, node_id=f"node-{attempt}", outcome=outcome)
        lease.lease_time.FromSeconds(start_s)
        lease.end_time.FromSeconds(end_s)
    for member, outcome in enumerate(["ACCEPTED", "SUPERSEDED"]):
        facts = {"member": member, "attempt": 2, "node_id": "node-2", "outcome": outcome}
        episode = made.episodes.add(episode_id=f"e.{member}", **facts)
        episode.push_time.FromSeconds(1023)
    made.trajectories.add(
        trajectory_id="e.0-0",
        episode_id="e.0",
        policy_id="solver",
        min_version=3,
        max_version=4,
        reward=1.0,
        place=pb.TRAJECTORY_PLACE_TRAINED,
        batch_id="b-9",
        step=5,
        published_version=5,
    )
    return made


def text_of(trace: pb.TaskTrace) -> str:
    return printed(trace_tree(trace), width=200)


def test_the_tree_leads_from_the_task_to_the_version() -> None:
    assert [line.rstrip() for line in text_of(task()).splitlines()] == [
        "task train-7 is done · training · 2 of 2 episodes are in",
        "├── attempt 1 on node-1, leased after 1.0 s, lease_expired after 20 s",
        "└── attempt 2 on node-2, leased after 22 s, completed after 2.0 s",
        "    ├── episode e.0 (member 0) pushed after 23 s, accepted",
        "    │   └── trajectory e.0-0: solver, reward 1, sampled by version 3 to 4"
        " → trained → batch b-9, step 5 → version 5",
        "    └── episode e.1 (member 1) pushed after 23 s, superseded",
    ]


def test_a_lease_that_runs_says_so() -> None:
    trace = task()
    trace.state = pb.TASK_STATE_LEASED
    trace.leases[1].ClearField("end_time")
    trace.missing_members = 1
    page = text_of(trace)
    assert "is being run · training · 1 of 2 episodes are in" in page
    assert "attempt 2 on node-2, leased after 22 s, still running" in page


def test_a_second_copy_is_told_from_a_second_attempt() -> None:
    trace = task()
    trace.leases[0].lease_id = "train-7#1"
    trace.leases[1].MergeFrom(pb.LeaseTrace(lease_id="train-7#1-h", attempt=1))
    page = text_of(trace)
    assert "── attempt 1 on node-1, leased" in page
    assert "── hedge of attempt 1 on node-2, leased" in page


def test_a_dropped_trajectory_says_why() -> None:
    trace = task()
    dropped = pb.TrajectoryTrace(episode_id="e.0", place=pb.TRAJECTORY_PLACE_DROPPED, drop_reason="stale")
    trace.trajectories[0].CopyFrom(dropped)
    assert "→ dropped: stale\n" in text_of(trace).replace(" \n", "\n").replace("  ", "")


def test_episodes_of_leases_that_are_not_kept_are_shown_all_the_same() -> None:
    trace = task()
    del trace.leases[:]
    trace.truncated = True
    page = text_of(trace)
    assert "pushed outside any recorded lease" in page
    assert "episode e.0" in page
    assert "earlier history is not kept" in page


def test_refusals_and_an_early_end_are_told() -> None:
    page = text_of(pb.TaskTrace(task_id="t", closed_reason="dead_letter", refused_by=["node-3"]))
    assert "closed early: dead_letter" in page
    assert "refused by node-3: it lacks a capability" in page
