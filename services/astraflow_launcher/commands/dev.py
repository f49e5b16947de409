"""`astraflow dev [RECIPE]`: options, their checks, and the summary of a run for people and for
programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from astraflow.commands import wording
from astraflow.errors import InvalidArgumentError
from astraflow.recipe import Recipe
from astraflow.recipe.file import LoadedRecipe, load_recipe
from astraflow_kit.log_files import MAX_BYTES
from astraflow_kit.settings import load
from astraflow_launcher.commands.local_run import (
    AsJson,
    DataDir,
    Engine,
    EnginePython,
    Environments,
    Nodes,
    Overrides,
    Quiet,
    RecipeArgument,
    Seed,
    Serve,
    conduct,
    node_options,
    own_folder,
)
from astraflow_launcher.run.dashboard_page import has_screen
from astraflow_launcher.run.development_run import MAX_SILENCE_S, Options, Part
from astraflow_launcher.run.folder import RunFolder, planned_folder
from astraflow_launcher.run.plan import Plan, as_tables, plan_run
from astraflow_launcher.view.metrics_file import to_json
from astraflow_launcher.view.observation import parse_goal
from astraflow_launcher.view.summary import Summary, as_table
from astraflow_raas.settings import EMBEDDED_ENGINE
from astraflow_weights.daemon_settings import StoreAccess
from astraflow_weights.store import open_store
from astraflow_weights.store.probing import probe_create_only

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(add_completion=False)

GOAL_MISSED = STOPPED = 1

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

MaxLog = Annotated[
    float,
    typer.Option(
        "--max-log-mib",
        min=0.01,
        metavar="MIB",
        help="Rotate the log of a process at this size; three older ones are kept.",
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
    recipe: RecipeArgument = Path("quickstart"),
    overrides: Overrides = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps in all (run.steps).")] = None,
    seed: Seed = None,
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
    nodes: Nodes = 1,
    serve: Serve = "",
    engine: Engine = "",
    engine_python: EnginePython = None,
    environment: Environments = None,
    trainer_ranks: Annotated[
        int, typer.Option(min=1, max=64, help="Processes of each policy's trainer, which share its batches.")
    ] = 1,
    data_dir: DataDir = None,
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
    max_log_mib: MaxLog = MAX_BYTES / 2**20,
    accept_data_loss: AcceptDataLoss = False,
    traces: Annotated[
        bool, typer.Option("--traces", help="Export spans of OpenTelemetry; see docs/traces.md.")
    ] = False,
    as_json_: AsJson = False,
    quiet: Quiet = False,
    opens: Annotated[
        bool | None,
        typer.Option(
            "--open/--no-open", help="Show the dashboard in a browser. Default: at a terminal with a screen."
        ),
    ] = None,
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
    if nodes != 1 and loaded.recipe.raas.autoscaling is not None:
        raise InvalidArgumentError(
            f"--nodes {nodes}: this recipe has raas.autoscaling, which says how many nodes there are; give --set "
            f"raas.autoscaling.start_nodes={nodes}, or --set raas.autoscaling=null"
        )
    of_nodes, engines = node_options(
        loaded.recipe, serve=serve, engine=engine, engine_python=engine_python, environments=environment or []
    )
    goal = parse_goal(until, subjects=_subjects(loaded.recipe)) if until else None
    options = Options(
        loaded=loaded,
        num_nodes=nodes,
        node_options=of_nodes,
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
        max_log_bytes=int(max_log_mib * 2**20),
        accept_data_loss=accept_data_loss,
        opens_dashboard=has_screen() if opens is None else opens,
        traces=traces,
    )
    if dry_run:
        root, continues = planned_folder(loaded, data_dir=data_dir)
        kind = engine or EMBEDDED_ENGINE
        plan = plan_run(options, engine=kind, engines=engines, root=root, continues=continues)
        _show_plan(plan, as_json_object=as_json_)
        return
    if store and not (data_dir and (data_dir / "run.json").exists()):
        # Refused before a model is warmed up. A store that the run has used before is for its trainers to wait for.
        probe_create_only(open_store(store, settings=load(StoreAccess).store))
    _conduct(options, own_folder(loaded, data_dir), quiet=quiet, as_json_object=as_json_)


def _conduct(options: Options, folder: RunFolder, *, quiet: bool, as_json_object: bool) -> None:
    """Run to the end, shown on stderr, and leave with the status of the run."""
    console = wording.terminal(stderr=True)
    with folder.lock:
        summary = conduct(options, folder, console, quiet=quiet)
        _finish(summary, folder, console, as_json_object=as_json_object)


def _load(recipe: Path, overrides: Sequence[str], *, steps: int | None, seed: int | None) -> LoadedRecipe:
    """The recipe with all overrides; the options that stand for a key win, and errors name them."""
    values = {"run.steps": steps, "run.seed": seed}
    given = [f"{key}={value}" for key, value in values.items() if value is not None]
    options = {key: f"--{key.removeprefix('run.')}" for key, value in values.items() if value is not None}
    return load_recipe(recipe, overrides=[*overrides, *given], options=options)


def _show_plan(plan: Plan, *, as_json_object: bool) -> None:
    if as_json_object:
        typer.echo(to_json(asdict(plan)))
        return
    for table in as_tables(plan):
        wording.console().print(table)


def _subjects(recipe: Recipe) -> list[str]:
    """What a condition may be about: trained policies and roles."""
    policies = [policy_id for policy_id in recipe.policies if recipe.policy(policy_id).train]
    roles = [name for name, role in recipe.resolved_roles.items() if role.is_trained]
    return list(dict.fromkeys([*policies, *roles]))


def _finish(summary: Summary, folder: RunFolder, console: Console, *, as_json_object: bool) -> None:
    text = to_json(asdict(summary))
    folder.summary.write_text(text + "\n")
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
