"""`astraflow recipe`: check a recipe folder, show it resolved, or print the JSON schema for editors."""

from __future__ import annotations

import importlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from astraflow.errors import PluginError, RecipeError
from astraflow.plugins import Reward, Workflow
from astraflow.recipe import declared_roles, json_schema, workflow_roles
from astraflow.recipe.file import LoadedRecipe, load_recipe

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Check a recipe, or print the schema.")

RecipeArgument = Annotated[Path, typer.Argument(help="Recipe folder, or a YAML file.", metavar="RECIPE")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a key, for example run.steps=20; repeatable.", metavar="KEY=VALUE"),
]


@app.command()
def check(recipe: RecipeArgument, overrides: SetOption = None) -> None:
    """Validate RECIPE and print it with every default and override resolved.

    Where its workflow can be imported here, the roles that its class declares are held against the recipe's.
    """
    loaded = load_recipe(recipe, overrides=overrides or ())
    _check_roles(loaded)
    typer.echo(loaded.yaml_text)


@app.command()
def schema() -> None:
    """Print the JSON schema of recipe.yaml; docs/recipe.schema.json holds the same text."""
    typer.echo(json.dumps(json_schema(), indent=2))


def _check_roles(loaded: LoadedRecipe) -> None:
    """Raise RecipeError when the workflow plays other roles. What an instance declares is checked by nodes."""
    recipe, use = loaded.recipe, loaded.recipe.raas.workflow.use
    try:
        plugins = importlib.import_module("astraflow_kit.plugins")
        found = plugins.load(use, protocol=Workflow, recipe_dir=loaded.folder)
    except (ModuleNotFoundError, PluginError) as error:
        typer.echo(f"the roles of the workflow are not checked: {error}", err=True)
        return
    reward = None
    if recipe.raas.reward is not None:
        with suppress(PluginError):  # a node says what is wrong with it
            reward = plugins.load(recipe.raas.reward.use, protocol=Reward, recipe_dir=loaded.folder)
    declared = declared_roles(found, reward)
    if isinstance(declared, property):
        return
    try:
        workflow_roles(declared, roles=recipe.resolved_roles, are_given=bool(recipe.roles))
    except (TypeError, ValueError) as error:
        raise RecipeError(f"raas.workflow: {use}: {error}") from error
