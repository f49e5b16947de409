"""`astraflow dev [RECIPE]`: options, their checks, and the summary of a run for people and for
programs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from astraflow.commands import wording
from astraflow.errors import InvalidArgumentError, StateError
from astraflow.recipe import Recipe
from astraflow.recipe.file import LoadedRecipe, load_recipe
from astraflow_kit.lifecycle import ExitCode
from astraflow_kit.log import configure
from astraflow_kit.settings import load
from astraflow_launcher.run.development_run import MAX_SILENCE_S, DevelopmentRun, Options, Part
from astraflow_launcher.run.folder import RunFolder, open_run_folder, planned_folder
from astraflow_launcher.run.plan import Choices, as_tables, plan_run
from astraflow_launcher.view.live import LineView, LiveView, QuietView, View
from astraflow_launcher.view.metrics_file import to_json
from astraflow_launcher.view.observation import parse_goal
from astraflow_launcher.view.summary import Summary, as_table
from astraflow_raas.engine.command import require_engine
from astraflow_raas.settings import EMBEDDED_ENGINE, NodeSettings
from astraflow_weights.daemon_settings import StoreAccess
from astraflow_weights.store import open_store
from astraflow_weights.store.probing import probe_create_only

app = typer.Typer(add_completion=False)

GOAL_MISSED = STOPPED = 1
INTERRUPTED = int(ExitCode.HARD_STOP)

Without = Annotated[
    list[Part] | None, typer.Option(help="Leave a part out, to start it by hand; repeatable.")
]
MaxRestarts = Annotated[
    int, typer.Option(min=0, metavar="N", help="End when one process died more often than this in a minute.")
]

MaxSilence = Annotated[
    float,
    typer.Option(
        "--max-silence-s",
        min=0,
        metavar="S",
        help="Replace a process that is alive and answers nothing for so long; 0: never.",
    ),
]

AcceptDataLoss = Annotated[
    bool,
    typer.Option(
        "--accept-data-loss",
        help="Go on from the checkpoints although Redis lost what they know; see docs/recovery.md.",
    ),
]


@app.command()
def dev(
    recipe: Annotated[
        Path, typer.Argument(help="Folder, YAML file, or the name of a recipe of this release.")
    ] = Path("quickstart"),
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe key; repeatable."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps in all (run.steps).")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of everything (run.seed).")] = None,
    until: Annotated[
        str | None,
        typer.Option(
            metavar="CONDITION",
            help="End early once two evaluations in a row satisfy it: heldout>=0.7, verifier.heldout>=0.8, team>=0.9",
        ),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=1, metavar="SECONDS", help="End training after this time.")
    ] = None,
    nodes: Annotated[
        int, typer.Option(min=0, max=64, help="RaaS nodes, each with an engine per policy.")
    ] = 1,
    serve: Annotated[
        str,
        typer.Option(metavar="POLICY=N,…", help="Engines of each policy on each node: solver=2,verifier=1."),
    ] = "",
    engine: Annotated[
        str, typer.Option(metavar="KIND|URL", help="Engine of the nodes: cpu, sglang, or http://…")
    ] = "",
    engine_python: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Interpreter that starts it: SGLang has its own.")
    ] = None,
    environment: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=HOST:PORT", help="Where `served:NAME` of the recipe is served; repeatable."
        ),
    ] = None,
    trainer_ranks: Annotated[
        int, typer.Option(min=1, max=64, help="Processes of each policy's trainer, which share its batches.")
    ] = 1,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of the run; what is there is continued. Default: a new one.")
    ] = None,
    redis: Annotated[
        str | None, typer.Option(metavar="URL", help="Use this Redis instead of an embedded one.")
    ] = None,
    store: Annotated[
        str | None, typer.Option(metavar="URI", help="Weight store, file:///… or s3://bucket/prefix.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port of the dataflow server. Default: a free one.")
    ] = None,
    http_port: Annotated[
        int | None, typer.Option(help="Port of its pages for people. Default: a free one.")
    ] = None,
    without: Without = None,
    max_restarts: MaxRestarts = 8,
    max_silence_s: MaxSilence = MAX_SILENCE_S,
    accept_data_loss: AcceptDataLoss = False,
    as_json_: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end, on stdout.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print what would be started, where and with what; start nothing."),
    ] = False,
) -> None:
    """Run RECIPE on this machine: Redis, dataflow server, nodes with engines, one trainer per policy.

    Everything binds to loopback and ends with this command. Not for production.
    """
    loaded = _load(recipe, overrides or [], steps=steps, seed=seed)
    if nodes == 0 and Part.RAAS not in (without or []):
        raise InvalidArgumentError("--nodes 0 leaves no node to run tasks; give more, or --without raas")
    node_options, engines = _node_options(
        loaded.recipe, serve=serve, engine=engine, engine_python=engine_python, environments=environment or []
    )
    goal = parse_goal(until, subjects=_subjects(loaded.recipe)) if until else None
    if dry_run:
        choices = Choices(
            num_nodes=nodes,
            engine=engine or EMBEDDED_ENGINE,
            engines=engines,
            trainer_ranks=trainer_ranks,
            redis_url=redis,
            store_uri=store,
            grpc_port=port,
            http_port=http_port,
            until=until,
            timeout_s=timeout,
            without=frozenset(without or ()),
        )
        _show_plan(loaded, choices, data_dir=data_dir, as_json_object=as_json_)
        return
    if store and not (data_dir and (data_dir / "run.json").exists()):
        # Refused before a model is warmed up. A store that the run has used before is for its trainers to wait for.
        probe_create_only(open_store(store, settings=load(StoreAccess).store))
    folder = _own_folder(loaded, data_dir)
    options = Options(
        loaded=loaded,
        folder=folder,
        num_nodes=nodes,
        node_options=node_options,
        trainer_ranks=trainer_ranks,
        redis_url=redis,
        store_uri=store,
        grpc_port=port,
        http_port=http_port,
        goal=goal,
        timeout_s=timeout,
        without=frozenset(without or ()),
        max_restarts=max_restarts,
        max_silence_s=max_silence_s,
        accept_data_loss=accept_data_loss,
    )
    _conduct(options, quiet=quiet, as_json_object=as_json_)


def _conduct(options: Options, *, quiet: bool, as_json_object: bool) -> None:
    """Run to the end, shown on stderr, and leave with the status of the run."""
    folder = options.folder
    configure("launcher", log_format="json", stream=folder.log("launcher").open("a"))
    console = Console(stderr=True)
    view = _choose_view(console, quiet=quiet, title=f"{options.loaded.recipe.run.name} · {folder.root}")
    with folder.lock:
        try:
            with view:
                summary = asyncio.run(_run(options, view))
        except asyncio.CancelledError:
            console.print(
                f"ended at once by a second signal; go on with --data-dir {folder.root}", soft_wrap=True
            )
            raise typer.Exit(INTERRUPTED) from None
        _finish(summary, options, console, as_json_object=as_json_object)


def _load(recipe: Path, overrides: Sequence[str], *, steps: int | None, seed: int | None) -> LoadedRecipe:
    """The recipe with all overrides; the options that stand for a key win, and errors name them."""
    values = {"run.steps": steps, "run.seed": seed}
    given = [f"{key}={value}" for key, value in values.items() if value is not None]
    options = {key: f"--{key.removeprefix('run.')}" for key, value in values.items() if value is not None}
    return load_recipe(recipe, overrides=[*overrides, *given], options=options)


def _show_plan(
    loaded: LoadedRecipe, choices: Choices, *, data_dir: Path | None, as_json_object: bool
) -> None:
    root, continues = planned_folder(loaded, data_dir=data_dir)
    plan = plan_run(loaded.recipe, choices, source=loaded.file or Path(), root=root, continues=continues)
    if as_json_object:
        typer.echo(to_json(asdict(plan)))
        return
    for table in as_tables(plan):
        wording.console().print(table)


def _own_folder(loaded: LoadedRecipe, data_dir: Path | None) -> RunFolder:
    """The run's folder, locked; ends with the status of daemons whose work is another process's when it is not ours."""
    try:
        return open_run_folder(loaded, data_dir=data_dir)
    except StateError as error:
        typer.echo(f"{error.reason}: {error.message}", err=True)
        raise typer.Exit(ExitCode.SUPERSEDED) from None


def _subjects(recipe: Recipe) -> list[str]:
    """What a condition may be about: trained policies and roles."""
    policies = [policy_id for policy_id in recipe.policies if recipe.policy(policy_id).train]
    roles = [name for name, role in recipe.resolved_roles.items() if role.is_trained]
    return list(dict.fromkeys([*policies, *roles]))


async def _run(options: Options, view: View) -> Summary:
    # Made inside the loop: the run's client belongs to the loop it is made in.
    return await DevelopmentRun(options, view).run()


def _choose_view(console: Console, *, quiet: bool, title: str) -> View:
    if quiet:
        return QuietView()
    return LiveView(console, title=title) if console.is_terminal else LineView(console)


def _node_options(
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


def _finish(summary: Summary, options: Options, console: Console, *, as_json_object: bool) -> None:
    text = to_json(asdict(summary))
    options.folder.summary.write_text(text + "\n")
    console.print(as_table(summary))
    if as_json_object:
        typer.echo(text)
    if summary.stopped_for:
        console.print(
            f"the run was stopped: {summary.stopped_for}", style="bold red", markup=False, soft_wrap=True
        )
        raise typer.Exit(STOPPED)
    if summary.goal_met is False:
        raise typer.Exit(GOAL_MISSED)
