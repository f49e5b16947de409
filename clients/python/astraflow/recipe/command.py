"""`astraflow recipe`: check a recipe folder, show it resolved, or print the JSON schema for editors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from astraflow.recipe import json_schema
from astraflow.recipe.file import load_recipe

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Check a recipe, or print the schema.")

RecipeArgument = Annotated[Path, typer.Argument(help="Recipe folder, or a YAML file.", metavar="RECIPE")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a key, for example run.steps=20; repeatable.", metavar="KEY=VALUE"),
]


@app.command()
def check(recipe: RecipeArgument, overrides: SetOption = None) -> None:
    """Validate RECIPE and print it with every default and override resolved."""
    typer.echo(load_recipe(recipe, overrides=overrides or ()).yaml_text)


@app.command()
def schema() -> None:
    """Print the JSON schema of recipe.yaml; docs/recipe.schema.json holds the same text."""
    typer.echo(json.dumps(json_schema(), indent=2))
