"""A selector earns by its choice alone, answers by their own rewards."""

import asyncio
from typing import Any

import pytest

from astraflow.plugins import Episode, Message, PolicyUnavailable, TaskSpec
from astraflow_raas.grading.scoring import RewardScorer
from astraflow_raas.workflows.solver_selector import SolverSelector
from support.agents import ScriptedPolicy

TASK = TaskSpec("t", (Message("user", "3 + 4?"),), {"answer": "7"})


def play(answers: list[str], choice: str, **differing: Any) -> tuple[Episode, ScriptedPolicy]:
    script = list(answers)
    workflow = SolverSelector(
        reward=RewardScorer(lambda task, completion: float(completion == task.data["answer"])),
        answers=len(answers),
        selector_prompt="{problem} {answers}",
        answer_prompt="{letter}:{answer}",
        separator=" ",
    )
    solver = ScriptedPolicy(lambda _: script.pop(0))
    selector = ScriptedPolicy(lambda _: choice, name="selector", role="selector", **differing)
    return asyncio.run(workflow.run(TASK, {"solver": solver, "selector": selector})), selector


@pytest.mark.parametrize(
    ("answers", "choice", "earned", "team"),
    [
        (["7", "8"], "A", 1.0, 1.0),
        (["7", "8"], "Rather B.", 0.0, 0.0),
        (["7", "8"], "A? No: B, or A", 1.0, 1.0),
        (["7", "8"], "ABBA", 0.0, 1.0),
        (["7", "8"], "C", 0.0, 1.0),
        (["7", "7"], "B", 0.5, 1.0),
        (["8", "9"], "A", 0.5, 0.0),
        (["8", "9", "7"], "C", 1.0, 1.0),
    ],
)
def test_a_choice_earns_more_than_half_only_where_there_was_a_wrong_one(
    answers: list[str], choice: str, earned: float, team: float
) -> None:
    episode, selector = play(answers, choice)
    own = [("solver", float(answer == "7")) for answer in answers]
    assert [(item.role, item.reward) for item in episode.trajectories] == [*own, ("selector", earned)]
    assert episode.metrics["team"] == team
    shown = " ".join(f"{letter}:{answer}" for letter, answer in zip("ABC", answers, strict=False))
    assert selector.prompts == [f"<user>3 + 4? {shown}¶<assistant>"]


@pytest.mark.parametrize("differing", [{"wants_trajectory": False}, {"fault": PolicyUnavailable("down")}])
def test_without_a_selector_the_answers_are_what_there_is(differing: dict[str, Any]) -> None:
    episode, _ = play(["7", "8"], "A", **differing)
    assert [item.role for item in episode.trajectories] == ["solver", "solver"]
    assert "team" not in episode.metrics


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"answers": 1}, "answers is 1; give 2 to 26"),
        ({"answer_prompt": "x"}, r"answer_prompt has no \{letter\}"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SolverSelector(reward=RewardScorer(lambda task, completion: 0.0), **settings)
