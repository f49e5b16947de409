"""What `astraflow dev` and `astraflow eval` share: options of a run on this machine, their checks, and its conduct.

Invariant: what cannot work is refused before anything is made or started. Errors of the recipe name the option.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from astraflow.commands.wording import say
from astraflow.errors import StateError
from astraflow.recipe import Recipe
from astraflow.recipe.file import LoadedRecipe
from astraflow_kit.lifecycle import ExitCode
from astraflow_kit.log import configure
from astraflow_kit.settings import load
from astraflow_launcher.run.development_run import DevelopmentRun, Options
from astraflow_launcher.run.folder import RunFolder, open_run_folder
from astraflow_launcher.view.live import LineView, LiveView, QuietView, View
from astraflow_launcher.view.summary import Summary
from astraflow_raas.engine.command import require_engine
from astraflow_raas.settings import NodeSettings

if TYPE_CHECKING:
    from rich.console import Console

INTERRUPTED = int(ExitCode.HARD_STOP)

RecipeArgument = Annotated[
    Path, typer.Argument(help="Folder, YAML file, or the name of a recipe of this release.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe key; repeatable."),
]
Seed = Annotated[int | None, typer.Option(min=0, help="Seed of everything (run.seed).")]
Nodes = Annotated[int, typer.Option(min=0, max=64, help="RaaS nodes, each with an engine per policy.")]
Serve = Annotated[
    str,
    typer.Option(metavar="POLICY=N,…", help="Engines of each policy on each node: solver=2,verifier=1."),
]
Engine = Annotated[
    str, typer.Option(metavar="KIND|URL", help="Engine of the nodes: cpu, sglang, or http://…")
]
EnginePython = Annotated[
    Path | None, typer.Option(metavar="PATH", help="Interpreter that starts it: SGLang has its own.")
]
Environments = Annotated[
    list[str] | None,
    typer.Option(
        "--environment",
        metavar="NAME=HOST:PORT",
        help="Where `served:NAME` of the recipe is served; repeatable.",
    ),
]
DataDir = Annotated[
    Path | None, typer.Option(help="Folder of the run; what is there is continued. Default: a new one.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object at the end, on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]


def own_folder(loaded: LoadedRecipe, data_dir: Path | None) -> RunFolder:
    """The run's folder, locked."""
    with _ending_as_daemons():
        folder = open_run_folder(loaded, data_dir=data_dir)
    for note in folder.notes:
        say(note, err=True)
    for change in folder.changes:
        say(f"trainers go on with another recipe: {change}", err=True)
    return folder


def node_options(
    recipe: Recipe, *, serve: str, engine: str, engine_python: Path | None, environments: Sequence[str]
) -> tuple[tuple[str, ...], dict[str, int]]:
    """Options of each node, and its engines of each policy. Refused here and not by the first node: nothing has been
    started yet.
    """
    named = {"serve": serve, "engine": engine, "engine_python": str(engine_python) if engine_python else ""}
    given = {name: value for name, value in named.items() if value}
    many = {"environments": tuple(environments)} if environments else {}
    settings = load(NodeSettings, {"join": "127.0.0.1:1", **given, **many})
    asyncio.run(require_engine(settings.engine, python=settings.engine_python))
    engines = settings.engines_of(recipe.engine_policies)
    options = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]
    return (*options, *(part for each in environments for part in ("--environment", each))), engines


def conduct(options: Options, folder: RunFolder, console: Console, *, quiet: bool) -> Summary:
    """Run to the end, shown on `console`. The caller holds the folder's lock. Leaves when ended by a second signal."""
    configure("launcher", log_format="json", stream=folder.log("launcher").open("a"))
    view = _choose_view(console, quiet=quiet, title=f"{options.loaded.recipe.run.name} · {folder.root}")
    try:
        with _ending_as_daemons(), view:
            return asyncio.run(_run(replace(options, loaded=folder.loaded), folder, view))
    except asyncio.CancelledError:
        console.print(
            f"ended at once by a second signal; go on with --data-dir {folder.root}", soft_wrap=True
        )
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def _ending_as_daemons() -> Iterator[None]:
    """End with the status of daemons whose work is another's, or of another release, where that is so here."""
    try:
        yield
    except StateError as error:
        say(f"{error.reason}: {error.message}", err=True)
        raise typer.Exit(ExitCode.SUPERSEDED) from None


async def _run(options: Options, folder: RunFolder, view: View) -> Summary:
    # Made inside the loop: the run's client belongs to the loop it is made in.
    return await DevelopmentRun(options, folder, view).run()


def _choose_view(console: Console, *, quiet: bool, title: str) -> View:
    if quiet:
        return QuietView()
    return LiveView(console, title=title) if console.is_terminal else LineView(console)
