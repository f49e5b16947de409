"""The two-policy recipe: one split for both policies, checks that are never wrong, prompts as in the workflow."""

import asyncio
import re
from itertools import islice

import pytest

from astraflow.plugins import Dataset, Demonstration, Demonstrations, Reward, TaskSpec, Workflow
from astraflow.recipe.file import load_recipe
from astraflow_kit.plugins import RecipeSource, make
from astraflow_raas.grading.scoring import RewardScorer
from support.agents import ScriptedPolicy
from support.recipes import recipe_code
from support.source_tree import REPOSITORY

recipe = recipe_code("solver-verifier-tiny")
ALL_PAIRS = [(a, b) for a in range(20, 100) for b in range(10, 90) if a - b >= 10]


def _numbers(prompt: str) -> tuple[int, int]:
    a, b, *_ = re.findall(r"\d+", prompt)
    return int(a), int(b)


def _shown(stream: Demonstrations, seed: int) -> list[Demonstration]:
    return list(islice(stream(seed), 4000))


def test_the_classes_are_the_plug_ins_that_the_daemons_ask_for() -> None:
    assert isinstance(recipe.SubtractionProblems(seed=0), Dataset)
    assert isinstance(recipe.BoxedDifference(), Reward)
    assert isinstance(recipe.solver_demonstrations, Demonstrations)
    assert isinstance(recipe.verifier_demonstrations, Demonstrations)


@pytest.mark.parametrize("seed", [0, 1])
def test_neither_policy_ever_learns_on_a_held_out_pair(seed: int) -> None:
    dataset = recipe.SubtractionProblems(seed=seed)
    shown = [dataset.train(index).messages for index in range(4000)]
    for stream in (recipe.solver_demonstrations, recipe.verifier_demonstrations):
        shown += [item.messages for item in _shown(stream, seed)]
    assert not [messages for messages in shown if recipe.is_held_out(*_numbers(messages[0].content))]
    evaluated = {_numbers(dataset.heldout(index).messages[0].content) for index in range(4000)}
    assert evaluated <= {pair for pair in ALL_PAIRS if recipe.is_held_out(*pair)}
    assert len(evaluated) > 300


def test_tasks_and_demonstrations_repeat_for_their_seed_and_differ_between_seeds() -> None:
    one, same, other = (recipe.SubtractionProblems(seed=seed) for seed in (1, 1, 2))
    assert [one.train(index) for index in (5, 3)] == [same.train(index) for index in (5, 3)]
    assert one.train(5) != other.train(5)
    assert _shown(recipe.verifier_demonstrations, 1)[:9] == _shown(recipe.verifier_demonstrations, 1)[:9]


def test_careful_answers_and_checks_are_correct_for_every_pair() -> None:
    for a, b in ALL_PAIRS:
        task = TaskSpec("t", (), {"difference": a - b})
        assert recipe.BoxedDifference()(task, recipe.careful_answer(a, b)) == 1.0
        for proposed in {a - b, a - b - 1, a - b + 10, 42, 89}:
            verdict = recipe.careful_check(a, b, proposed).split()[-1]
            assert verdict == ("approve" if proposed == a - b else "reject")


@pytest.mark.parametrize(
    ("a", "b", "answer"),
    [
        (82, 35, r"2-5=7b 8-3=4 \boxed{47}"),
        (57, 23, r"7-3=4 5-2=3 \boxed{34}"),
        (30, 15, r"0-5=5b 3-1=1 \boxed{15}"),
    ],
)
def test_careful_answers_borrow_where_paper_does(a: int, b: int, answer: str) -> None:
    assert recipe.careful_answer(a, b) == answer


@pytest.mark.parametrize(
    ("proposed", "check"),
    [
        (47, "7+5=2c:2y 4+3=8:8y approve"),
        (48, "8+5=3c:2n 4+3=8:8y reject"),
        (57, "7+5=2c:2y 5+3=9:8n reject"),
        (89, "9+5=4c:2n 8+3=12:8n reject"),
    ],
)
def test_careful_checks_add_back_column_by_column(proposed: int, check: str) -> None:
    assert recipe.careful_check(82, 35, proposed) == check


def test_careless_verdicts_are_right_by_chance_and_half_of_all_checks() -> None:
    checks = [recipe.verifier_demonstration(index, seed=0) for index in range(8000)]
    careless = [
        (says == "approve") == (proposed == shown.difference)
        for shown, proposed, says in checks
        if says in ("approve", "reject")
    ]
    assert abs(len(careless) / len(checks) - (1 - recipe.CAREFUL_SHARE)) < 0.02
    assert abs(sum(careless) / len(careless) - 0.5) < 0.03


@pytest.mark.parametrize(
    ("completion", "reward"),
    [(r"\boxed{47}", 1.0), (r"\boxed{48} \boxed{ 47 }", 1.0), (r"\boxed{47} \boxed{48}", 0.0), ("47", 0.0)],
)
def test_only_the_exact_difference_in_the_last_box_is_rewarded(completion: str, reward: float) -> None:
    assert recipe.BoxedDifference()(TaskSpec("t", (), {"difference": 47}), completion) == reward


def test_the_verifier_is_asked_as_its_demonstrations_were_written() -> None:
    settings = load_recipe(REPOSITORY / "recipes" / "solver-verifier-tiny").recipe.raas.workflow
    reward = RewardScorer(recipe.BoxedDifference())
    workflow = make(settings, protocol=Workflow, source=RecipeSource(), reward=reward)
    task = recipe.SubtractionProblems(seed=0).train(0)
    a, b = _numbers(task.messages[0].content)
    solver = ScriptedPolicy(lambda _: recipe.careful_answer(a, b), role="solver")
    verifier = ScriptedPolicy(lambda _: recipe.careful_check(a, b, a - b), name="verifier", role="verifier")
    episode = asyncio.run(workflow.run(task, {"solver": solver, "verifier": verifier}))
    assert verifier.prompts == [f"<user>{task.messages[0].content} Answer: {a - b}¶<assistant>"]
    assert [trajectory.reward for trajectory in episode.trajectories] == [1.0, 1.0]
