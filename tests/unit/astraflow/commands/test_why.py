"""`why` says for each wait who, since when, the figures and what releases it; a verdict comes first."""

from astraflow.commands.why import judge, why_page
from astraflow.dataflow.v1 import admin_service_pb2 as pb
from astraflow.dataflow.v1 import run_pb2
from support.printed import printed


def answer(*waits: pb.Wait, state: int = run_pb2.RUN_STATE_ACTIVE) -> pb.WhyResponse:
    """What the server says of a run called quickstart."""
    return pb.WhyResponse(run_id="quickstart", state=state, waits=waits)  # type: ignore[arg-type]


def wait(reason: str, *, seconds: float, stage: str = "batch") -> pb.Wait:
    """One wait with its figures."""
    told = {"detail": f"figures of {reason}", "released_by": f"end of {reason}"}
    made = pb.Wait(stage=stage, policy_id="solver", reason=reason, **told)
    made.waited_duration.FromMilliseconds(int(seconds * 1000))
    return made


def text_of(*looks: pb.WhyResponse) -> str:
    return printed(why_page(looks[-1], judge(list(looks), over_s=3.0)))


def test_each_wait_is_a_block_and_the_longest_comes_first() -> None:
    page = text_of(answer(wait("ready_groups", seconds=2), wait("unpublished", seconds=70, stage="publish")))
    assert page.splitlines() == [
        "run quickstart is active",
        "",
        "rollout-bound: the trainer of solver waited for finished groups in 100% of 1 checks over 3 s",
        "",
        "publishing solver has waited 70 s: unpublished",
        "  figures of unpublished",
        "  next: end of unpublished",
        "",
        "training solver has waited 2.0 s: ready_groups",
        "  figures of ready_groups",
        "  next: end of ready_groups",
    ]


def test_a_run_in_which_all_flows_says_so() -> None:
    page = text_of(answer(), answer())
    assert "balanced: no stage waited more than 20% of the last 3 s" in page
    assert "nothing waits at this moment" in page


def test_a_finished_run_has_its_own_verdict() -> None:
    assert "finished: the run has ended" in text_of(answer(state=run_pb2.RUN_STATE_FINISHED))


def failing(in_a_row: int) -> pb.WhyResponse:
    """A run whose reward raises while its trainer waits."""
    made = answer(wait("ready_groups", seconds=2))
    told = {
        "reason": "reward_error",
        "detail": "KeyError: 'a' (recipe.py:9 in f)",
        "task_id": "t1",
        "node_id": "n1",
    }
    made.failures.add(count=1276, in_a_row=in_a_row, **told)  # type: ignore[arg-type]
    made.dead_letters = 12
    return made


def test_failures_in_a_row_come_first_and_are_the_verdict() -> None:
    lines = text_of(failing(1276)).splitlines()
    assert (
        lines[2]
        == "failing: 1276 leases in a row failed alike: reward_error: KeyError: 'a' (recipe.py:9 in f)"
    )
    assert lines[5].startswith(
        "  reward_error: KeyError: 'a' (recipe.py:9 in f) · 1,276 times, 1,276 in a row;"
    )
    assert "12 tasks failed and will not be retried" in lines[7]
    assert "training solver has waited" in lines[9]


def test_failures_between_completed_tasks_are_shown_beside_what_bounds_the_run() -> None:
    lines = text_of(failing(0)).splitlines()
    assert lines[2].startswith("rollout-bound")
    assert lines[5].startswith(
        "  reward_error: KeyError: 'a' (recipe.py:9 in f) · 1,276 times; first: task t1 on n1"
    )


def test_a_stopped_run_says_why() -> None:
    made = answer(state=run_pb2.RUN_STATE_FINISHED)
    made.stopped_for = "tasks failed alike 100 times in a row"
    assert "failing: the server stopped the run: tasks failed alike 100 times in a row" in text_of(made)
