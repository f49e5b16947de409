"""The recipes of this release are found by name wherever the package is installed, and each is whole."""

import re
from pathlib import Path

import pytest

from astraflow.errors import RecipeError
from astraflow.recipe.file import load_recipe
from astraflow.recipe.shipped import shipped_recipes
from support.source_tree import REPOSITORY

RECIPES = REPOSITORY / "recipes"
FILES = sorted(path.relative_to(RECIPES) for path in RECIPES.glob("*/*.yaml"))
FOLDERS = sorted({path.parent.name for path in FILES})
OF_ONE_SIZE = {"quickstart", "solver-verifier-tiny", "number-search-tiny", "agent-tiny"}


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
        RecipeError, match=r"no recipe at quickstar/recipe.yaml: .*quickstart, .*solver-verifier-tiny"
    ):
        load_recipe(Path("quickstar"))


@pytest.mark.parametrize("file", FILES, ids=str)
def test_every_file_is_valid_and_has_the_code_that_it_names(file: Path) -> None:
    loaded = load_recipe(RECIPES / file)
    named = set(re.findall(r"\brecipe:([A-Za-z]\w*)", loaded.yaml_text))
    written = "\n".join(each.content.decode() for each in loaded.code if each.path == "recipe.py")
    assert {
        name for name in named if not re.search(rf"^(class|def|from .* import\b.*) {name}\b", written, re.M)
    } == set()


@pytest.mark.parametrize("name", FOLDERS)
def test_a_recipe_has_both_sizes_with_one_workflow_and_reward(name: str) -> None:
    if name in OF_ONE_SIZE:
        return
    large, small = (load_recipe(RECIPES / name / file).recipe.raas for file in ("recipe.yaml", "small.yaml"))
    assert small.workflow.use == large.workflow.use
    assert small.reward == large.reward


@pytest.mark.parametrize("name", FOLDERS)
def test_a_recipe_shows_its_commands_and_has_its_row_in_the_table(name: str) -> None:
    readme, table = (RECIPES / name / "README.md").read_text(), (RECIPES / "README.md").read_text()
    (row,) = [line for line in table.splitlines() if line.startswith(f"| [{name}]({name}/README.md) |")]
    assert (
        "\n| workload | policies | data | licence | time of the small size | expected curve | command |\n"
        in table
    )
    assert row.count("|") == 8
    shown = set(re.findall(r"(?<![\w/])recipes/[\w./-]+", readme))
    sizes = {f"recipes/{name}"} | ({f"recipes/{name}/small.yaml"} if name not in OF_ONE_SIZE else set())
    assert sizes <= shown
    assert {path for path in shown if not (REPOSITORY / path).exists()} == set()
