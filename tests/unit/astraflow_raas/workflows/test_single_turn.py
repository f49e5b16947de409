"""The ready-made workflow, as a recipe's own test would use it: no service, no engine."""

import asyncio
from unittest.mock import AsyncMock, Mock

import pytest

from astraflow.errors import RecipeError
from astraflow.plugins import GenerateResult, Message, TaskSpec, VersionSpan
from astraflow_raas.grading.scoring import RewardScorer
from astraflow_raas.rewards.boxed_match import BoxedMatch
from astraflow_raas.workflows.single_turn import SingleTurn

TASK = TaskSpec("t", (Message("user", "3 + 4?"),), {"answer": "7"})


BOXED = RewardScorer(BoxedMatch())
SPANS = (VersionSpan(0, 1, 4), VersionSpan(1, 2, 5))
ANSWER = GenerateResult((8, 9), (-0.5, -0.25), SPANS, r"\boxed{7}", "length")


def one_policy() -> Mock:
    """Answers every prompt with the same two tokens, sampled under two versions."""
    policy = Mock(encode=lambda messages, tools: [1, 2, 3], generate=AsyncMock(return_value=ANSWER))
    policy.name = "solver"
    return policy


def test_a_single_turn_trains_on_the_completion_alone() -> None:
    episode = asyncio.run(SingleTurn(reward=BOXED).run(TASK, {"solver": one_policy()}))
    (trajectory,) = episode.trajectories
    assert trajectory.token_ids == (1, 2, 3, 8, 9)
    assert trajectory.loss_mask == (False, False, False, True, True)
    assert trajectory.logprobs == (0.0, 0.0, 0.0, -0.5, -0.25)
    assert trajectory.version_spans == (VersionSpan(3, 4, 4), VersionSpan(4, 5, 5))
    assert (trajectory.reward, trajectory.finish_reason) == (1.0, "length")


def test_a_single_turn_does_not_guess_among_policies() -> None:
    with pytest.raises(RecipeError, match="exactly one role"):
        asyncio.run(SingleTurn(reward=BOXED).run(TASK, {"a": one_policy(), "b": one_policy()}))
