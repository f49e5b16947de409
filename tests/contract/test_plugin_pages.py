"""The pages in docs/plugins: their code runs as a recipe's own, with the settings and the tests that they show."""

import types
from pathlib import Path
from typing import Any

import pytest
import yaml

from astraflow import plugins
from astraflow.recipe import Recipe
from astraflow.recipe.file import parse_recipe
from astraflow_dataflow.runs.data_plugins import DataPlugins
from astraflow_kit.plugins import RecipeSource, make
from astraflow_raas.environments.recipe_environments import RecipeEnvironments
from astraflow_raas.environments.served import ServedEnvironments
from astraflow_raas.workflows.multi_turn import MultiTurn
from support.dataflow_world import recipe_text
from support.manual import blocks_of
from support.source_tree import REPOSITORY

PAGES = sorted((REPOSITORY / "docs" / "plugins").glob("*.md"))
DATA_PAGES = ("dataset", "curator", "filter", "selector")
NODE_PAGES = ("workflow", "reward", "environment")


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language; those that are files of their own are in `tests/e2e/test_manual.py`."""
    found = blocks_of(page.read_text())
    return [block.text for block in found if block.language == language and block.kind != "file"]


def merged(base: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """`base` with the sections of `part` in it."""
    return base | {key: {**base.get(key, {}), **value} for key, value in part.items()}


def recipe_of(name: str, folder: Path) -> tuple[Recipe, RecipeSource]:
    """A recipe with what a page shows first, and the page's code in the folder."""
    page = REPOSITORY / "docs" / "plugins" / f"{name}.md"
    (folder / "recipe.py").write_text("\n".join(blocks(page, "python")))
    part = yaml.safe_load(blocks(page, "yaml")[0])
    text = yaml.safe_dump(merged(yaml.safe_load(recipe_text()), part))
    return parse_recipe(text).recipe, RecipeSource(text=text, folder=folder)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_tests_on_a_page_pass(page: Path) -> None:
    module = types.ModuleType(page.stem)
    exec(compile("\n".join(blocks(page, "python")), page.name, "exec"), vars(module))  # noqa: S102
    tests = [value for name, value in vars(module).items() if name.startswith("test_")]
    assert tests or page.stem not in (*DATA_PAGES, *NODE_PAGES)
    for test in tests:
        test()


@pytest.mark.parametrize("name", DATA_PAGES)
def test_the_recipe_on_a_page_makes_its_plugin(name: str, tmp_path: Path) -> None:
    recipe, source = recipe_of(name, tmp_path)
    made = DataPlugins.make(recipe, source)
    named = [plugin for plugin in (*made.filters, *made.curators, made.selector) if plugin is not None]
    assert [plugin.name for plugin in named if plugin.name.startswith("recipe:")] or name == "dataset"
    assert all(plugin.state is not None for plugin in made.curators)


@pytest.mark.parametrize("name", NODE_PAGES)
def test_the_recipe_on_a_page_makes_its_workflow_and_reward(name: str, tmp_path: Path) -> None:
    recipe, source = recipe_of(name, tmp_path)
    settings = recipe.raas
    assert settings.reward is not None
    reward = make(settings.reward, protocol=plugins.Reward, source=source)
    environments = RecipeEnvironments(source, served=ServedEnvironments())
    workflow = make(
        settings.workflow, protocol=plugins.Workflow, source=source, reward=reward, environments=environments
    )
    if name == "environment":
        assert isinstance(workflow, MultiTurn)
        return
    assert (reward if name == "reward" else workflow).__class__.__module__.startswith("astraflow_recipe")
