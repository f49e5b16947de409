"""Training tasks are answered by what they show, evaluations by the policy."""

import asyncio
from unittest.mock import AsyncMock, Mock

import pytest

from astraflow.plugins import GenerateResult, Message, TaskSpec, VersionSpan
from astraflow_raas.grading.scoring import RewardScorer
from astraflow_raas.rewards.boxed_match import BoxedMatch
from astraflow_raas.workflows.demonstrated import Demonstrated

MESSAGES, BOXED = (Message("user", "3 + 4?"),), RewardScorer(BoxedMatch())
SHOWN = TaskSpec("train-1", MESSAGES, {"answer": "7", "completion": r"\boxed{7}"})


def _policy(*, is_evaluation: bool = False) -> Mock:
    """Shows text as its characters, and says one token where it is sampled."""

    def demonstrate(text: str) -> GenerateResult:
        ids = tuple(map(ord, text))
        return GenerateResult(ids, (0.0,) * len(ids), (VersionSpan(0, len(ids), 5),), text, "stop")

    said = GenerateResult((8,), (-0.5,), (VersionSpan(0, 1, 5),), "8", "stop")
    policy = Mock(
        is_evaluation=is_evaluation,
        encode=lambda messages, tools: [1, 2],
        demonstrate=demonstrate,
        generate=AsyncMock(return_value=said),
    )
    policy.name = policy.role = "solver"
    return policy


def test_what_a_training_task_shows_is_pushed_as_if_it_had_been_said() -> None:
    policy = _policy()
    (trajectory,) = asyncio.run(Demonstrated(reward=BOXED).run(SHOWN, {"solver": policy})).trajectories
    assert trajectory.token_ids == (1, 2, *map(ord, r"\boxed{7}"))
    assert trajectory.loss_mask == (False, False, *[True] * 9)
    assert set(trajectory.logprobs) == {0.0}
    assert (trajectory.version_spans, trajectory.reward) == ((VersionSpan(2, 11, 5),), 1.0)
    policy.generate.assert_not_called()


def test_an_evaluation_is_sampled_whatever_its_task_shows() -> None:
    policy = _policy(is_evaluation=True)
    (trajectory,) = asyncio.run(Demonstrated(reward=BOXED).run(SHOWN, {"solver": policy})).trajectories
    assert (trajectory.token_ids, trajectory.reward) == ((1, 2, 8), 0.0)


def test_a_training_task_that_shows_nothing_is_named() -> None:
    task = TaskSpec("train-9", MESSAGES, {"answer": "7"})
    with pytest.raises(ValueError, match=r"data\['completion'\] of training task train-9 is None"):
        asyncio.run(Demonstrated(reward=BOXED).run(task, {"solver": _policy()}))
