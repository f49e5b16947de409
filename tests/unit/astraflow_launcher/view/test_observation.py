"""Conditions that end a run, and what an observation derives."""

import pytest

from astraflow.dataflow.v1.version_pb2 import Version
from astraflow.errors import InvalidArgumentError
from astraflow_launcher.view.observation import Observation, parse_goal
from astraflow_launcher.view.totals import StepPoint
from support.observations import evaluation, observed

BOTH = ("solver", "verifier")


def _observed(*rewards: float, policies: tuple[str, ...] = ("solver",)) -> Observation:
    rows = [(policy, *row) for policy in policies for row in enumerate(rewards)]
    evaluations = [evaluation(version, reward, policy=policy) for policy, version, reward in rows]
    return observed(*evaluations, policies=policies)


@pytest.mark.parametrize(
    ("rewards", "met"),
    [
        ((), False),
        ((0.9,), False),
        ((0.9, 0.6), False),
        ((0.6, 0.9), False),
        ((0.7, 0.7), True),
        ((0.1, 0.8, 0.9), True),
    ],
)
def test_a_goal_needs_two_evaluations_in_a_row(rewards: tuple[float, ...], met: bool) -> None:
    assert parse_goal("heldout>=0.7", subjects=BOTH).met(_observed(*rewards)) is met


def test_a_goal_must_be_met_by_every_policy() -> None:
    found = _observed(0.9, 0.9, policies=("solver", "verifier"))
    assert found.status is not None
    found.status.evaluations[-1].mean_reward = 0.1
    assert not parse_goal("heldout>=0.7", subjects=BOTH).met(found)


def test_a_goal_may_be_about_one_policy_a_role_or_a_metric_of_the_episodes() -> None:
    found = _observed(0.9, 0.9, policies=BOTH)
    assert found.status is not None
    for item in found.status.evaluations:
        item.num_samples = 8
        item.metrics["team"] = 0.6
        if item.policy_id == "solver":
            item.mean_reward = 0.1
            item.roles.add(role="plan", num_samples=8, mean_reward=0.5)
    expected = {
        "verifier.heldout>=0.9": True,
        "solver.heldout>=0.9": False,
        "team>=0.6": True,
        "team>=0.7": False,
    }
    assert {text: parse_goal(text, subjects=BOTH).met(found) for text in expected} == expected


@pytest.mark.parametrize(
    ("text", "right"),
    [("verifer.heldout>=0.8", "there are solver, verifier"), ("taem>=0.8", "they have team")],
)
def test_a_wrong_name_lists_the_right_ones(text: str, right: str) -> None:
    found = _observed(0.9, 0.9, policies=BOTH)
    assert found.status is not None
    for item in found.status.evaluations:
        item.num_samples, item.metrics["team"] = 8, 1.0
    with pytest.raises(InvalidArgumentError, match=right):
        parse_goal(text, subjects=BOTH).met(found)


def test_incomplete_evaluations_do_not_count() -> None:
    found = _observed(0.9, 0.9)
    assert found.status is not None
    found.status.evaluations[0].complete = False
    assert not parse_goal("0.7", subjects=BOTH).met(found)


def test_a_training_reward_goal_looks_at_steps() -> None:
    found = _observed()
    found.steps += [StepPoint("solver", step, 1.0, {"reward_mean": 0.95}) for step in (1, 2)]
    assert parse_goal("reward >= 0.9", subjects=BOTH).met(found)
    assert not parse_goal("reward <= 0.9", subjects=BOTH).met(found)


@pytest.mark.parametrize("text", ["", "heldout", "heldout>0.7", "heldout>=high"])
def test_a_condition_that_is_none_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"heldout>=0\.7"):
        parse_goal(text, subjects=BOTH)


def test_last_step_is_per_policy() -> None:
    found = Observation(steps=[StepPoint("a", 1, 0, {}), StepPoint("b", 7, 0, {}), StepPoint("a", 2, 0, {})])
    last = [found.last_step(policy) for policy in ("a", "b", "c")]
    assert [point and point.step for point in last] == [2, 7, None]


def test_a_policy_that_is_not_trained_has_no_part_in_the_goal() -> None:
    found = observed(evaluation(0, 0.9), evaluation(1, 0.9), frozen=("judge",))
    assert found.policies() == ["solver"]
    assert parse_goal("heldout>=0.7", subjects=BOTH).met(found)


def test_what_is_forgotten_still_counts_and_what_is_held_is_bounded() -> None:
    skipped, broken = {"skipped": 1.0}, {"skipped": 1.0, "skipped_no_signal": 0.0}
    found = [skipped, {"reward_mean": 0.5}, broken, {}, skipped]
    steps = [
        StepPoint(policy, step, 0, figures) for step, figures in enumerate(found) for policy in ("a", "b")
    ]
    versions = [
        Version(version=number, delta_bytes=number, snapshot_bytes=9, density=0.5) for number in range(5)
    ]
    whole = observed(policies=("a", "b"), steps=list(steps), versions={"a": list(versions)})
    bounded = observed(policies=("a", "b"), versions={"a": []})
    for number, point in enumerate(steps):
        bounded.steps.append(point)
        bounded.versions["a"] += versions[number : number + 1]
        bounded.forget(kept=1)
        assert bounded.steps_after(number) == [point]
    assert [point.step for point in bounded.steps] == [4, 4]
    assert [version.version for version in bounded.versions["a"]] == [4]
    assert (bounded.num_steps, bounded.num_skipped) == (whole.num_steps, whole.num_skipped) == (10, 6)
    for policy in ("a", "b"):
        assert bounded.totals(policy) == whole.totals(policy)
        assert bounded.last_step(policy) == whole.last_step(policy)
    assert (bounded.steps_after(10), bounded.versions_after("a", 5)) == ([], [])
    assert bounded.versions_after("a", 4) == versions[4:]
