"""The status page says what there is, and nothing about what there is not."""

from rich.console import Group

from astraflow.commands.status import data_parts, status_page
from astraflow.dataflow.v1 import account_pb2, run_pb2, version_pb2
from astraflow.dataflow.v1 import admin_service_pb2 as pb
from support.printed import printed


def text_of(status: pb.StatusResponse) -> str:
    return printed(status_page(status))


def full_status() -> pb.StatusResponse:
    """A run in the middle of its work."""
    node = pb.NodeStatus(node_id="node-1", connected=True, serving_versions={"solver": 3})
    policy = pb.PolicyStatus(
        policy_id="solver",
        version=version_pb2.Version(version=3, density=0.081),
        last_finished_step=3,
        staleness=pb.StalenessSummary(p50=1, max=2),
    )
    evaluation = pb.Evaluation(policy_id="solver", num_samples=32, num_planned=32, complete=True)
    dropped = {"stale": 60, "incomplete": 40, "poison": 0}
    wait = pb.Wait(stage="batch", policy_id="solver", reason="ready_groups", detail="2 of 8 groups are ready")
    wait.waited_duration.FromMilliseconds(4200)
    return pb.StatusResponse(
        run_id="quickstart",
        state=run_pb2.RUN_STATE_ACTIVE,
        trajectories=account_pb2.TrajectoryAccount(ingested=1200, trained=1000, ready=100, dropped=dropped),
        policies=[policy],
        nodes=[node],
        evaluations=[evaluation],
        waits=[wait],
    )


def test_a_policy_that_is_not_trained_says_so() -> None:
    status = full_status()
    status.policies.add(policy_id="judge", frozen=True)
    status.policies.add(policy_id="wise", frozen=True, external=True)
    page = text_of(status)
    assert "judge (not trained)" in page
    assert "wise (external)" in page


def test_a_fork_says_what_its_policies_started_with() -> None:
    status = full_status()
    status.policies[0].origin.CopyFrom(
        pb.VersionOrigin(run_id="base", policy_id="actor", version=40, step=41)
    )
    status.policies.add(
        policy_id="judge", origin=pb.VersionOrigin(run_id="base", policy_id="judge", version=0)
    )
    page = text_of(status)
    assert "solver starts with version 40 of policy actor of run base, after step 41\n" in page
    assert "judge starts with version 0 of policy judge of run base\n" in page


def test_the_page_shows_every_part_of_a_working_run() -> None:
    page = text_of(full_status())
    for said in (
        "run quickstart is active",
        "median 1, largest 2",
        "8.1%",
        "1,200 arrived = 1,000 trained + 100 ready + 100 dropped (stale 60, incomplete 40)",
        "nothing is lost",
        "solver 3",
        "32 of 32",
        "ready_groups",
        "4.2 s",
        "2 of 8 groups are ready",
    ):
        assert said in page, said
    assert "not be retried" not in page


def test_a_run_that_has_just_begun_shows_no_empty_tables() -> None:
    page = text_of(pb.StatusResponse(run_id="quickstart", state=run_pb2.RUN_STATE_ACTIVE))
    for absent in ("policies", "trajectories", "nodes", "evaluations", "dead-letters"):
        assert absent not in page, absent
    assert "nothing waits" in page


def test_a_conservation_error_is_said_with_where_to_read_on() -> None:
    status = full_status()
    status.trajectories.conservation_error = 3
    page = text_of(status)
    assert "conservation error 3: see docs/debugging.md" in page
    assert "nothing is lost" not in page


def test_given_up_tasks_are_said_with_the_command_that_lists_them() -> None:
    status = full_status()
    status.dead_letters = 2
    assert "2 tasks failed and will not be retried: `astraflow dead-letters list`" in text_of(status)


def test_a_finished_run_waits_for_nothing_and_says_nothing_of_it() -> None:
    assert "waits" not in text_of(pb.StatusResponse(run_id="r", state=run_pb2.RUN_STATE_FINISHED))


def test_a_node_that_left_says_since_when() -> None:
    status = full_status()
    status.nodes[0].connected = False
    status.nodes[0].last_seen_time.GetCurrentTime()
    assert "gone for 0.0 s" in text_of(status)


def test_a_node_that_is_sent_home_says_why() -> None:
    status = full_status()
    status.nodes[0].drain_reason = "upgrade"
    assert "draining: upgrade" in text_of(status)


def test_where_routes_took_groups_and_what_shadow_plugins_would_have_decided() -> None:
    shadows = [
        pb.ShadowPlugin(kind="curator", name="recipe:Hard", asked=9, differs=2, refused=2),
        pb.ShadowPlugin(kind="filter", name="recipe:Short", asked=40, differs=7, refused=12),
        pb.ShadowPlugin(kind="selector", name="recipe:New", asked=16, differs=3),
    ]
    route = pb.RouteCount(
        verdict="evaluated_easy", policy_id="solver", groups=5, trajectories=40, mean_reward=0.5
    )
    for answer in (
        pb.StatusResponse(shadows=shadows, routes=[route]),
        pb.WhyResponse(shadows=shadows, routes=[route]),
    ):
        page = printed(Group(*data_parts(answer)))
        assert [line.strip() for line in page.splitlines() if line.startswith("  ")] == [
            "evaluated_easy: 5 groups of solver, mean reward 0.500",
            "shadow recipe:Hard would have skipped 2 of 9 tasks, 2 otherwise than it went",
            "shadow recipe:Short would have dropped 12 of 40 groups, 7 otherwise than it went",
            "shadow recipe:New would have chosen 3 of 16 groups otherwise",
        ]
    assert "shadow" not in printed(status_page(pb.StatusResponse(run_id="run")))
