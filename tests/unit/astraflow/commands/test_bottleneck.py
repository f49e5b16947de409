"""The verdict names what bounds a run, with the figure it rests on."""

import pytest

from astraflow.commands.bottleneck import Bound, find_bottleneck
from astraflow.dataflow.v1 import admin_service_pb2 as pb

GROUPS = pb.Wait(stage="batch", policy_id="solver", reason="ready_groups")
WINDOW = pb.Wait(stage="lease", policy_id="solver", reason="staleness_window")
UNPUBLISHED = pb.Wait(stage="publish", policy_id="solver", reason="unpublished")
PUBLISH = pb.Wait(stage="publish", policy_id="solver", reason="publish")
NOTHING: list[pb.Wait] = []


@pytest.mark.parametrize(
    ("look", "bound"),
    [
        ([GROUPS], Bound.ROLLOUT),
        ([WINDOW], Bound.TRAINER),
        ([WINDOW, UNPUBLISHED], Bound.STORE),
        ([PUBLISH], Bound.STORE),
        ([UNPUBLISHED], Bound.BALANCED),
        (NOTHING, Bound.BALANCED),
    ],
)
def test_each_wait_tells_what_bounds_the_run(look: list[pb.Wait], bound: Bound) -> None:
    assert find_bottleneck([look, look], over_s=1.0).bound is bound


def test_the_most_frequent_wait_decides_and_its_share_is_said() -> None:
    looks = [[GROUPS], [GROUPS], [WINDOW], NOTHING]
    verdict = find_bottleneck(looks, over_s=3.0)
    assert (verdict.bound, verdict.share, verdict.policy_id) == (Bound.ROLLOUT, 0.5, "solver")
    waited = "the trainer of solver waited for finished groups in 50% of 4 checks over 3 s"
    assert verdict.sentence == f"rollout-bound: {waited}"


def test_a_wait_that_is_rarely_seen_bounds_nothing() -> None:
    verdict = find_bottleneck([[GROUPS], *[NOTHING] * 9], over_s=3.0)
    assert verdict.bound is Bound.BALANCED
    assert "20%" in verdict.sentence


STUCK = ["no_node", "no_capable_node", "no_version", "no_trainer", "dataset_exhausted"]


@pytest.mark.parametrize("reason", STUCK)
def test_a_stage_that_cannot_move_by_itself_blocks_whatever_else_waits(reason: str) -> None:
    blocking = pb.Wait(stage="lease", reason=reason)
    verdict = find_bottleneck([[GROUPS], [GROUPS], [GROUPS, blocking]], over_s=3.0)
    assert verdict.bound is Bound.BLOCKED
    assert verdict.sentence.startswith("blocked: no") or "data set" in verdict.sentence


def test_a_block_that_is_over_is_not_the_verdict() -> None:
    blocking = pb.Wait(stage="lease", reason="no_node")
    assert find_bottleneck([[blocking], [GROUPS], [GROUPS]], over_s=3.0).bound is Bound.ROLLOUT


def test_an_evaluation_that_waits_for_a_node_does_not_block_training() -> None:
    waiting = pb.Wait(stage="evaluate", policy_id="solver", reason="no_node_at_version")
    assert find_bottleneck([[waiting, GROUPS]], over_s=1.0).bound is Bound.ROLLOUT


def test_weights_that_are_still_made_do_not_block_a_run() -> None:
    no_version = pb.Wait(stage="lease", reason="no_version")
    warm = pb.Wait(stage="batch", policy_id="solver", reason="warm_start", progress=0.45)
    verdict = find_bottleneck([[no_version, warm]], over_s=1.0)
    assert verdict.sentence == "starting: the trainer makes the initial model, 45% done (batch of solver)"
    no_node = pb.Wait(stage="lease", reason="no_node")
    assert find_bottleneck([[warm, no_node]], over_s=1.0).bound is Bound.BLOCKED


def test_of_several_blocks_the_one_to_see_to_first_is_the_verdict() -> None:
    old = pb.Wait(stage="lease", reason="no_node")
    old.waited_duration.FromSeconds(900)
    verdict = find_bottleneck([[old, pb.Wait(stage="publish", reason="store_missing")]], over_s=1.0)
    assert verdict.because == "the weight store is not there (publish)"
