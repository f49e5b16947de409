"""Experiment trackers are named, or given with their settings; each once."""

from pathlib import Path

import pytest

from astraflow.errors import RecipeError
from astraflow.recipe.file import load_recipe
from astraflow.recipe.trackers import TensorboardTracker, WandbTracker

QUICKSTART = Path(__file__).parents[4] / "recipes" / "quickstart"


def test_a_name_stands_for_its_defaults_and_settings_are_kept_in_the_text() -> None:
    given = "trainer.trackers=[tensorboard, {kind: wandb, project: sums, tags: [a]}]"
    loaded = load_recipe(QUICKSTART, overrides=[given])
    trackers = loaded.recipe.policy("solver").trainer.trackers
    assert trackers == [TensorboardTracker(), WandbTracker(project="sums", tags=["a"])]
    assert "project: sums" in loaded.yaml_text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("[wandbb]", "did you mean `wandb`"),
        ("[wandb, {kind: wandb, project: b}]", "trackers has one kind twice: wandb, wandb"),
        ("[{kind: mlflow, project: b}]", "project"),
        ("[{kind: wandb, project: ''}]", "at least 1 character"),
        ("wandb", "trainer.trackers"),
    ],
)
def test_a_mistake_is_refused_with_what_was_meant(given: str, said: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load_recipe(QUICKSTART, overrides=[f"trainer.trackers={given}"])
    assert said in str(refused.value)
