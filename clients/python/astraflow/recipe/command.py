"""`astraflow recipe`: make a recipe folder, check one, show what it says and where, compare two, print the schema."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from astraflow.recipe import json_schema
from astraflow.recipe.file import LoadedRecipe, load_recipe
from astraflow.recipe.template import write_recipe
from astraflow.recipe_changes import differences, settings_of

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Make a recipe, check, show or compare it, or print the schema.",
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
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: the resolved recipe, and what was tried.")
    ] = False,
) -> None:
    """Validate RECIPE and print it with every default and override resolved.

    Its code is run as daemons run it: plug-ins are made with their settings, the roles of the workflow are held against
    the recipe's, one task of the data set goes through the reward, and its prompt through each tokenizer. Stderr
    says what was tried. Nothing is downloaded; --no-code runs nothing of the recipe.
    """
    loaded = load_recipe(recipe, overrides=overrides or ())
    tried = []
    for line in _try(loaded) if code else ():
        tried.append(line)
        typer.echo(line, err=True)
    if as_json:
        typer.echo(json.dumps({"recipe": loaded.recipe.model_dump(mode="json"), "tried": tried}))
        return
    typer.echo(loaded.yaml_text)


@app.command()
def show(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    origin: Annotated[
        bool, typer.Option("--origin", help="One line a key, with what gave its value.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: the recipe, and the origins.")] = False,
) -> None:
    """Print RECIPE as it is with every default, extended file and override; nothing of it is run.

    With --origin, a line KEY=VALUE for each key, with the file and line or the option that its value is from, or
    `default`.

    Example: astraflow recipe show recipes/quickstart --origin | grep optimizer
    """
    loaded = load_recipe(recipe, overrides=overrides or ())
    settings = settings_of(loaded.recipe)
    origins = {".".join(keys): loaded.document.origin(keys) or "default" for keys in settings}
    if as_json:
        typer.echo(json.dumps({"recipe": loaded.recipe.model_dump(mode="json"), "origins": origins}))
    elif origin:
        for (key, place), value in zip(origins.items(), settings.values(), strict=True):
            typer.echo(f"{key}={value}  # {place}")
    else:
        typer.echo(loaded.yaml_text)


@app.command()
def diff(
    recipe: RecipeArgument,
    other: Annotated[Path, typer.Argument(help="The one to compare with.", metavar="OTHER")],
    overrides: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: both values of each key.")] = False,
) -> None:
    """Print the keys in which OTHER differs from RECIPE, once both are resolved. --set holds for both.

    Example: astraflow recipe diff quickstart my-task
    """
    before, after = (load_recipe(path, overrides=overrides or ()) for path in (recipe, other))
    differing = differences(before.recipe, after.recipe)
    if as_json:
        typer.echo(json.dumps({key: {"before": was, "after": now} for key, (was, now) in differing.items()}))
        return
    for key, (was, now) in differing.items():
        typer.echo(f"{key}: {was} → {now}")
    typer.echo(f"{len(differing)} keys differ", err=True)


@app.command()
def schema() -> None:
    """Print the JSON schema of recipe.yaml; docs/recipe.schema.json holds the same text."""
    typer.echo(json.dumps(json_schema(), indent=2))


def _try(loaded: LoadedRecipe) -> Iterator[str]:
    """Yield what was tried. Raises PluginError and RecipeError for what a run would fail on."""
    try:
        trial = importlib.import_module("astraflow_launcher.support.recipe_trial")
    except ModuleNotFoundError as error:
        yield (
            f"the recipe's code is not tried: the package {error.name!r} is not installed; run: "
            "pip install 'astraflow[dev]'"
        )
        return
    yield from trial.try_recipe(loaded)
