"""The ready-made workflow, as a recipe's own test would use it: no service, no engine."""

import asyncio
from collections.abc import Sequence

import pytest

from astraflow.errors import RecipeError
from astraflow.plugins import GenerateResult, Message, TaskSpec, VersionSpan, Workflow
from astraflow_kit.plugins import mismatch
from astraflow_raas.rewards.boxed_match import BoxedMatch
from astraflow_raas.workflows.single_turn import SingleTurn

TASK = TaskSpec("t", (Message("user", "3 + 4?"),), {"answer": "7"})


class OnePolicy:
    """Answers every prompt with the same two tokens, sampled under two versions."""

    name = "solver"

    def encode(self, messages: Sequence[Message], **_tools: object) -> list[int]:
        return [1, 2, 3]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "unused"

    async def generate(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int | None = None
    ) -> GenerateResult:
        spans = (VersionSpan(0, 1, 4), VersionSpan(1, 2, 5))
        return GenerateResult((8, 9), (-0.5, -0.25), spans, r"\boxed{7}", "length")


def test_it_satisfies_its_protocol() -> None:
    assert mismatch(SingleTurn, protocol=Workflow) is None


def test_a_single_turn_trains_on_the_completion_alone() -> None:
    episode = asyncio.run(SingleTurn(reward=BoxedMatch()).run(TASK, {"solver": OnePolicy()}))
    (trajectory,) = episode.trajectories
    assert trajectory.token_ids == (1, 2, 3, 8, 9)
    assert trajectory.loss_mask == (False, False, False, True, True)
    assert trajectory.logprobs == (0.0, 0.0, 0.0, -0.5, -0.25)
    assert trajectory.version_spans == (VersionSpan(3, 4, 4), VersionSpan(4, 5, 5))
    assert (trajectory.reward, trajectory.finish_reason) == (1.0, "length")


def test_a_single_turn_does_not_guess_among_policies() -> None:
    with pytest.raises(RecipeError, match="exactly one policy"):
        asyncio.run(SingleTurn(reward=BoxedMatch()).run(TASK, {"a": OnePolicy(), "b": OnePolicy()}))
