"""Distillation: a student that guesses, a teacher that was never shown a guess, and no word of rewards."""

from itertools import islice

import pytest

from astraflow.errors import RecipeError
from astraflow.recipe.file import load_recipe
from support.recipes import recipe_code
from support.source_tree import REPOSITORY

recipe = recipe_code("math")
FOLDER = REPOSITORY / "recipes" / "distill"
BUILT = (
    "trainer.algorithm.kl.reference={warm_start: {demonstrations: recipe:teacher_demonstrations, steps: 1}}"
)


def test_the_teacher_is_shown_careful_answers_only_and_other_questions_than_its_student() -> None:
    taught = list(islice(recipe.teacher_demonstrations(0), 500))
    assert all("=" in shown.completion for shown in taught)
    asked = {shown.messages[0].content for shown in islice(recipe.demonstrations(0), 500)}
    assert len([shown for shown in taught if shown.messages[0].content in asked]) < 25
    sums = recipe.Sums(seed=0)
    held_out = {sums.heldout(index).messages[0].content for index in range(500)}
    assert not [shown for shown in taught if shown.messages[0].content in held_out]


@pytest.mark.parametrize("file", ["recipe.yaml", "small.yaml"])
def test_the_teachers_log_probs_are_all_that_both_sizes_learn_from(file: str) -> None:
    policy = load_recipe(FOLDER / file).recipe.policy("solver")
    algorithm = policy.trainer.algorithm
    assert (algorithm.advantage.kind, algorithm.loss.kind) == ("none", "none")
    assert algorithm.kl is not None
    assert (algorithm.kl.placement, algorithm.kl.estimator, algorithm.kl.coefficient) == (
        "advantage",
        "k1",
        1.0,
    )


def test_a_teacher_cannot_be_built_for_a_policy_that_has_a_model_of_its_own() -> None:
    with pytest.raises(
        RecipeError, match=r"policies.solver: kl.reference.warm_start .* it trains none; give `path`"
    ):
        load_recipe(FOLDER / "recipe.yaml", overrides=[BUILT])
