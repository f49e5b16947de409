"""`astraflow recipe`: make a recipe folder, check one and show it resolved, or print the JSON schema for editors."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Annotated

import typer

from astraflow.recipe import json_schema
from astraflow.recipe.file import LoadedRecipe, load_recipe
from astraflow.recipe.template import write_recipe

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Make a recipe, check it, or print the schema."
)

RecipeArgument = Annotated[Path, typer.Argument(help="Recipe folder, or a YAML file.", metavar="RECIPE")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a key, for example run.steps=20; repeatable.", metavar="KEY=VALUE"),
]


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="NAME", help="New folder, and name of its runs.")],
    source: Annotated[
        str, typer.Option("--from", metavar="RECIPE", help="Recipe of this release to begin with.")
    ] = "quickstart",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: folder and files.")] = False,
) -> None:
    """Make a recipe that works, in a new folder: recipe.yaml, recipe.py with data set and reward, README.md.

    Example: astraflow recipe init my-task && astraflow dev my-task
    """
    files = write_recipe(folder, source=source)
    if as_json:
        typer.echo(json.dumps({"folder": str(folder), "files": [path.name for path in files]}))
        return
    typer.echo(f"{folder} has a recipe like {source}: {', '.join(path.name for path in files)}")
    typer.echo(f"next: astraflow recipe check {folder}; astraflow dev {folder}", err=True)


@app.command()
def check(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    code: Annotated[
        bool, typer.Option("--code/--no-code", help="Try its plug-ins too: one task, one grade, one prompt.")
    ] = True,
) -> None:
    """Validate RECIPE and print it with every default and override resolved.

    Its code is run as daemons run it: plug-ins are made with their settings, the roles of the workflow are held against
    the recipe's, one task of the data set goes through the reward, and its prompt through each tokenizer. Stderr
    says what was tried. Nothing is downloaded; --no-code runs nothing of the recipe.
    """
    loaded = load_recipe(recipe, overrides=overrides or ())
    if code:
        _try(loaded)
    typer.echo(loaded.yaml_text)


@app.command()
def schema() -> None:
    """Print the JSON schema of recipe.yaml; docs/recipe.schema.json holds the same text."""
    typer.echo(json.dumps(json_schema(), indent=2))


def _try(loaded: LoadedRecipe) -> None:
    """Tell what was tried. Raises PluginError and RecipeError for what a run would fail on."""
    try:
        trial = importlib.import_module("astraflow_launcher.support.recipe_trial")
    except ModuleNotFoundError as error:
        typer.echo(
            f"the recipe's code is not tried: the package {error.name!r} is not installed; run: "
            "pip install 'astraflow[dev]'",
            err=True,
        )
        return
    path = loaded.file
    assert path is not None, "it was read from a file"
    for line in trial.try_recipe(loaded, text=path.read_text(encoding="utf-8"), source=str(path)):
        typer.echo(line, err=True)
