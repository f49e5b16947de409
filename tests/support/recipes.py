"""A recipe that names everything a recipe must, for tests that only need one to exist; the code of shipped ones, and
shipped ones played by policies that follow a script.
"""

import importlib.util
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import cast

import pytest

from astraflow.agents import AgentEndpoint
from astraflow.client import Connection
from astraflow.commands.run_creation import run_of
from astraflow.plugins import Dataset, Episode, TaskSpec, Workflow
from astraflow.recipe import Recipe
from astraflow.recipe.file import LoadedRecipe, load_recipe, parse_recipe
from astraflow_dataflow.runs.data_plugins import DataPlugins
from astraflow_kit.plugins import RecipeSource
from astraflow_raas.environments.served import ServedEnvironments
from astraflow_raas.recipe_code import load_workflow
from support.agents import ScriptedPolicy
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
    spec = importlib.util.spec_from_file_location(
        f"{name.replace('-', '_')}_recipe", path, submodule_search_locations=[str(path.parent)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up while it is executed.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    return module


def task_data(name: str) -> Path:
    """The folder of real task data of this name; skips the test where ASTRAFLOW_TASK_DATA names no folder with it."""
    folder = Path(os.environ.get("ASTRAFLOW_TASK_DATA", "no-task-data"), name)
    if not folder.is_dir():
        pytest.skip(f"set ASTRAFLOW_TASK_DATA to a folder that holds {name}/")
    return folder


@dataclass(frozen=True, kw_only=True)
class PlayedRecipe:
    """A recipe's data set, workflow and reward, made as its daemons make them."""

    recipe: Recipe
    dataset: Dataset
    workflow: Workflow

    async def episode(self, task: TaskSpec, **answers: Callable[[str], str]) -> Episode:
        """Run one task; each role says what its `answers` make of the prompt."""
        roles = self.recipe.resolved_roles
        policies = {
            name: ScriptedPolicy(answer, name=roles[name].policy_id, role=name, max_new_tokens=8192)
            for name, answer in answers.items()
        }
        return await self.workflow.run(task, policies)


@asynccontextmanager
async def played(
    recipe: str, *overrides: str, scratch: Path, served: Mapping[str, str] | None = None
) -> AsyncIterator[PlayedRecipe]:
    """The recipe at `recipes/RECIPE`, with its rewards' worker processes for as long as the test has it; `served` says
    at which addresses environments are.
    """
    environments = ServedEnvironments({name: Connection(where) for name, where in (served or {}).items()})
    loaded = load_recipe(REPOSITORY / "recipes" / recipe, overrides=overrides)
    made = load_workflow(
        run_of(loaded, run_id=loaded.recipe.run.name, store_uri=""),
        loaded.recipe,
        into=scratch / "code",
        scratch=scratch,
        allowed=True,
        endpoint=cast("AgentEndpoint", None),  # for agents, of which there are none here
        served=environments,
    )
    code = scratch / "code" / loaded.code_sha256.hex()
    source = RecipeSource(text=loaded.yaml_text, folder=code if code.is_dir() else None)
    dataset = DataPlugins.make(loaded.recipe, source).dataset
    try:
        yield PlayedRecipe(recipe=loaded.recipe, dataset=dataset, workflow=made.workflow)
    finally:
        await environments.stop(deadline_s=5.0)
        for scorer in made.own_scorers:
            await scorer.stop(deadline_s=5.0)
