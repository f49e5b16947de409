"""A recipe that names everything a recipe must, for tests that only need one to exist, and the code of shipped ones."""

import importlib.util
import sys
from types import ModuleType

import pytest

from astraflow.recipe.file import LoadedRecipe, parse_recipe
from support.source_tree import REPOSITORY

TINY = """
run: {name: tiny, dataset: "recipe:Data"}
policies: {solver: {model: {path: some/model}}}
raas: {reward: "recipe:Reward"}
"""


def tiny_recipe(*overrides: str) -> LoadedRecipe:
    """The recipe with some of its keys replaced."""
    return parse_recipe(TINY, overrides=overrides)


def recipe_code(name: str) -> ModuleType:
    """The recipe.py of a shipped recipe."""
    path = REPOSITORY / "recipes" / name / "recipe.py"
    spec = importlib.util.spec_from_file_location(f"{name.replace('-', '_')}_recipe", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up while it is executed.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    return module
