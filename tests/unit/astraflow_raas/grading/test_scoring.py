"""Rewards in the event loop: awaited, named when they fail, given the policies when they ask for them."""

import asyncio
import sys
from typing import Any, cast

import pytest

from astraflow.errors import PluginError
from astraflow.plugins import MissingCapability, Policy, Reward, RewardFailed, RewardLimits, Score, TaskSpec
from astraflow.recipe.plugin_settings import PluginSettings
from astraflow.recipe.settings import RewardLimitSettings
from astraflow_kit.plugins import RecipeSource
from astraflow_raas.grading.scoring import RewardScorer, make_scorer

TASK = TaskSpec("t1", (), {"answer": "7"})


async def awaited(task: TaskSpec, completion: str) -> Score:
    await asyncio.sleep(0)
    return Score(0.5, {"tests": 3.0})


async def hangs(task: TaskSpec, completion: str) -> float:
    await asyncio.Event().wait()
    return 1.0


async def gives_up(task: TaskSpec, completion: str) -> float:
    raise TimeoutError("the far side is slow")


def asks(task: TaskSpec, completion: str, policies: Any = None) -> float:
    return float(len(policies))


def of(value: object) -> Reward:
    return cast("Reward", lambda task, completion: value)


@pytest.mark.parametrize(
    ("reward", "score"),
    [
        (of(1), Score(1.0)),
        (of(True), Score(1.0)),
        (of(Score(0.5, {"x": 2.0})), Score(0.5, {"x": 2.0})),
        (awaited, Score(0.5, {"tests": 3.0})),
        (asks, Score(1.0)),
    ],
)
async def test_every_form_of_a_reward_gives_a_score(reward: Reward, score: Score) -> None:
    policies = cast("dict[str, Policy]", {"solver": object()})
    assert await RewardScorer(reward, timeout_s=60)(TASK, "7", policies=policies) == score


@pytest.mark.parametrize(
    ("reward", "reason", "words"),
    [
        (of("7"), "reward_error", "returned '7' of type str"),
        (of(None), "reward_error", "of type NoneType"),
        (of(float("nan")), "reward_error", r"returned nan; return a finite number \(test_scoring.py:\d+ in "),
        (lambda task, completion: task.data["gold"], "reward_error", r"KeyError: 'gold' \(test_scoring.py:"),
        (of(10**400), "reward_error", "returned inf; return a finite number"),
        (lambda task, completion: sys.exit(3), "reward_error", r"SystemExit: 3 \(test_scoring.py:"),
        (gives_up, "reward_error", "TimeoutError: the far side is slow"),
        (hangs, "reward_timeout", "did not return within timeout_s 0.05"),
    ],
)
async def test_a_failure_is_named(reward: Reward, reason: str, words: str) -> None:
    with pytest.raises(RewardFailed, match=words) as failed:
        await RewardScorer(reward, timeout_s=0.05)(TASK, "7")
    assert failed.value.reason == reason


async def test_a_missing_capability_stays_one() -> None:
    async def needs(task: TaskSpec, completion: str) -> float:
        raise MissingCapability("no sandbox")

    with pytest.raises(MissingCapability):
        await RewardScorer(needs, timeout_s=60)(TASK, "7")


@pytest.mark.parametrize(
    ("reward", "given", "complaint"),
    [
        (awaited, {"processes": 2}, "set raas.reward_limits.processes to 0"),
        (asks, {"processes": 2}, "cannot run in worker processes"),
        (type("Odd", (), {"__call__": awaited, "limits": 3})(), {}, "make it a RewardLimits"),
    ],
)
def test_limits_that_do_not_fit_the_reward_are_refused(
    reward: Reward, given: dict[str, int], complaint: str
) -> None:
    with pytest.raises(PluginError, match=complaint):
        scorer_of(reward, **given)


async def test_the_recipe_overrides_the_limits_of_the_reward() -> None:
    class Slow:
        limits = RewardLimits(timeout_s=600.0)

        async def __call__(self, task: TaskSpec, completion: str) -> float:
            return await hangs(task, completion)

    with pytest.raises(RewardFailed, match=r"timeout_s 0\.05"):
        await scorer_of(Slow(), timeout_s=0.05)(TASK, "7")


def scorer_of(reward: Reward, **given: float) -> RewardScorer:
    plugin = PluginSettings(use="recipe:Mine")
    return make_scorer(reward, plugin, source=RecipeSource(), given=RewardLimitSettings.model_validate(given))
