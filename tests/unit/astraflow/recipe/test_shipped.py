"""The recipes of this release are found by name wherever the package is installed."""

from pathlib import Path

import pytest

from astraflow.errors import RecipeError
from astraflow.recipe.file import load_recipe
from astraflow.recipe.shipped import shipped_recipes
from support.source_tree import REPOSITORY


def test_every_recipe_of_the_checkout_is_shipped() -> None:
    assert shipped_recipes() == {
        path.parent.name: path.parent for path in REPOSITORY.glob("recipes/*/recipe.yaml")
    }


def test_a_bare_name_loads_the_shipped_recipe_where_no_folder_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_recipe(Path("quickstart")).folder == REPOSITORY / "recipes" / "quickstart"


def test_an_unknown_name_is_refused_with_the_names_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        RecipeError, match=r"no recipe at quickstar/recipe.yaml: .*quickstart, solver-verifier-tiny"
    ):
        load_recipe(Path("quickstar"))
