"""Who waits for whom: the verdict and its sentence, case by case."""

import math

import pytest

from astraflow_dataflow.status.balance import Fleet, balance

BUSY = Fleet(capacity=64, busy=60)
IDLE = Fleet(capacity=64, busy=16)
NONE = Fleet(capacity=0, busy=0)


@pytest.mark.parametrize(
    ("waited_s", "publishing_s", "nodes", "verdict", "sentence"),
    [
        (4.1, 0.0, BUSY, "rollout_bound", "rollout-bound: the trainer waits 41%; 1.7× nodes would fill it"),
        (9.0, 0.0, BUSY, "rollout_bound", "rollout-bound: the trainer waits 90%; 10.0× nodes would fill it"),
        (
            10.0,
            0.0,
            BUSY,
            "rollout_bound",
            "rollout-bound: the trainer waits 100%; 100.0× nodes would fill it",
        ),
        # Waiting to publish is not what more nodes would mend.
        (5.0, 1.0, BUSY, "rollout_bound", "rollout-bound: the trainer waits 50%; 1.7× nodes would fill it"),
        (4.0, 0.0, NONE, "rollout_bound", "rollout-bound: the trainer waits 40%; no node is connected"),
        (
            4.0,
            0.0,
            IDLE,
            "rollout_bound",
            "rollout-bound: the trainer waits 40%; but nodes have only 16 of 64 places busy: see what they wait for, "
            "more of them would not help yet",
        ),
        (
            4.0,
            3.0,
            BUSY,
            "publish_bound",
            "publish-bound: the trainer waits 30% for its own versions to be published; more nodes change nothing, a "
            "faster store or fewer bytes a version do",
        ),
        (
            0.2,
            0.0,
            IDLE,
            "trainer_bound",
            "trainer-bound: nodes have 16 of 64 places busy and the trainer waits 2%; 0.2× nodes would do",
        ),
        (0.5, 0.0, BUSY, "balanced", "balanced: the trainer waits 5% and nodes are 94% busy"),
        (0.0, 0.0, NONE, "balanced", "balanced: the trainer waits 0% and nodes are 100% busy"),
    ],
)
def test_the_verdict_is_one_sentence_with_its_figures(
    waited_s: float, publishing_s: float, nodes: Fleet, verdict: str, sentence: str
) -> None:
    step = {"wait_s": waited_s, "train_s": 10 - waited_s, "publish_wait_s": publishing_s}
    found = balance("solver", [step, step], nodes)
    assert found is not None
    assert (found.policy_id, found.verdict, found.num_steps) == ("solver", verdict, 2)
    assert found.sentence == sentence
    assert found.trainer_wait_share == pytest.approx(waited_s / 10)


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [{}],
        [{"wait_s": 1.0}],
        [{"wait_s": 0.0, "train_s": 0.0}],
        [{"wait_s": math.nan, "train_s": 1.0}],
    ],
)
def test_without_timed_steps_nothing_is_said(steps: list[dict[str, float]]) -> None:
    assert balance("solver", steps, BUSY) is None
