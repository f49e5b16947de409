"""Policies together and alone: what is read from a run, and when the comparison meets its targets."""

import math
from pathlib import Path
from typing import Any

import pytest

from astraflow_bench.policies import RunFigures, Training, compare, trained_policies, trial_of
from support.source_tree import REPOSITORY

LINES: list[dict[str, Any]] = [
    {"kind": "version", "policy": "solver"},
    {"kind": "step", "policy": "solver", "seconds": 10.0, "reward_mean": 0.5},
    {"kind": "step", "policy": "verifier", "seconds": 11.0, "reward_mean": 1.0},
    {"kind": "evaluation", "policy": "solver", "heldout_reward": 0.2},
    {"kind": "step", "policy": "solver", "seconds": 16.0, "reward_mean": 0.7},
    {"kind": "step", "policy": "solver", "seconds": 18.0},
    {"kind": "evaluation", "policy": "solver", "heldout_reward": 0.9},
]
SUMMARY = {"trajectories": {"ingested": 300, "evaluated": 100, "dropped": {"no_credit": 3, "stale": 9}}}


def trial(seed: int, no_credit: float = 0.0, **trainings: tuple[float, float]) -> RunFigures:
    """A run; reward and seconds by policy."""
    figures = {
        name: Training(mean_reward=reward, heldout=reward, seconds=seconds)
        for name, (reward, seconds) in trainings.items()
    }
    return RunFigures(seed=seed, trainings=figures, no_credit=no_credit)


def test_a_run_is_read_by_policy() -> None:
    found = trial_of(LINES, SUMMARY, seed=4)
    assert found.trainings["solver"] == Training(mean_reward=pytest.approx(0.6), heldout=0.9, seconds=8.0)
    assert math.isnan(found.trainings["verifier"].heldout)
    assert found.no_credit == 3 / 200


def test_runs_of_one_seed_are_paired_and_the_slower_policy_alone_is_the_measure_of_time() -> None:
    together = [trial(0, a=(0.5, 11), b=(0.8, 22)), trial(1, a=(0.7, 10), b=(0.8, 20))]
    alone = {
        "a": [trial(0, a=(0.4, 5)), trial(1, a=(0.7, 8))],
        "b": [trial(0, b=(0.8, 20)), trial(1, b=(0.8, 20))],
    }
    found = compare(together, alone)
    assert found.seeds == (0, 1)
    assert found.wall_ratio == pytest.approx((22 / 20 + 20 / 20) / 2)
    solver = found.mean_reward["a"]
    assert [solver.together, solver.alone] == pytest.approx([0.6, 0.55])
    assert solver.standard_error == pytest.approx(0.05)
    assert found.met


@pytest.mark.parametrize(
    "together",
    [
        [trial(0, a=(0.5, 10)), trial(1, a=(0.5, 10))],
        [trial(0, a=(0.6, 12)), trial(1, a=(0.6, 12))],
        [trial(0, a=(0.6, 10)), trial(1, a=(0.6, 10), no_credit=0.03)],
    ],
    ids=["less reward", "slower", "dropped"],
)
def test_a_missed_target_is_told(together: list[RunFigures]) -> None:
    assert not compare(together, {"a": [trial(0, a=(0.6, 10)), trial(1, a=(0.6, 10))]}).met


def test_a_recipe_needs_two_trained_policies() -> None:
    recipes = REPOSITORY / "recipes"
    assert trained_policies(recipes / "solver-verifier-tiny", ()) == ["solver", "verifier"]
    fixed = ["policies.verifier.train=false"]
    for recipe, overrides in ((recipes / "quickstart", []), (recipes / "solver-verifier-tiny", fixed)):
        with pytest.raises(ValueError, match="trains 1 policy; give a recipe that trains two or more"):
            trained_policies(Path(recipe), overrides)
