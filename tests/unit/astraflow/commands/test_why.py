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
