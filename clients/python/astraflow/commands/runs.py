"""`astraflow runs`: the life of a run without the launcher: created, followed, stopped, resumed, forked, deleted."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from astraflow import recipe_changes
from astraflow.client import Client
from astraflow.commands.options import grouped_options
from astraflow.commands.run_creation import (
    StoreOption,
    create_run,
    fork_run,
    origins_of,
    prepare_store,
    run_of,
)
from astraflow.commands.server import ServerOptions
from astraflow.commands.status import follow
from astraflow.commands.wording import (
    as_json,
    console,
    count_text,
    enum_text,
    number_text,
    origin_text,
    print_json,
    say,
    table,
)
from astraflow.dataflow.v1 import admin_service_pb2, run_pb2
from astraflow.dataflow.v1 import run_service_pb2 as pb
from astraflow.errors import PreconditionError
from astraflow.recipe import StoredVersionSettings
from astraflow.recipe.command import SetOption
from astraflow.recipe.file import load_recipe, parse_recipe

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Create, follow and end runs.")

_PAGE = 500
_DELETE_TIMEOUT_S = 120.0
_SAY_EVERY_S = 30.0

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run.")]
WaitOption = Annotated[bool, typer.Option("--wait", help="Then follow it until it is finished.")]


@app.command()
@grouped_options
def create(
    options: ServerOptions,
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="Folder, YAML file, or a name such as quickstart.")
    ],
    store: StoreOption,
    run_id: Annotated[str, typer.Option("--run-id", help="Name of the run. Default: the recipe's.")] = "",
    overrides: SetOption = None,
    probe: Annotated[
        bool, typer.Option(help="Make and prove the store from here; else its first trainer proves it.")
    ] = True,
    wait: WaitOption = False,
) -> None:
    """Create a run of RECIPE, for trainers and nodes to join. A run that exists with the same recipe is left as it is.

    The bucket of an s3:// store is created when it is missing. How to reach it comes from ASTRAFLOW_STORE_ENDPOINT_URL,
    ASTRAFLOW_STORE_REGION and ASTRAFLOW_STORE_CREDENTIALS_FILE, as for a trainer.
    """
    loaded = load_recipe(recipe, overrides=overrides or ())
    run = run_of(loaded, run_id=run_id or loaded.recipe.run.name, store_uri=store)
    with options.client() as client:
        if probe:
            say(prepare_store(store), err=True)
        created = create_run(client, run)
        if created.recipe_yaml != run.recipe_yaml:
            stored = parse_recipe(created.recipe_yaml, source=f"recipe of run {created.run_id}")
            for note in recipe_changes.resume(loaded, run=stored, written=created.recipe_as_written).notes:
                typer.echo(note, err=True)
        _say(options, created)
        if wait:
            _follow(client, created.run_id)


@app.command()
@grouped_options
def show(options: ServerOptions, run_id: RunArgument) -> None:
    """Show RUN: its state, its store, and the recipe as it was created."""
    with options.client() as client:
        run = client.call(client.runs.GetRun, pb.GetRunRequest(run_id=run_id)).run
    code = f"code: {len(run.code.files)} files, sha256 {run.code.sha256.hex()[:16]}…"
    origins = "".join(f"{_origin_text(name, start)}\n" for name, start in origins_of(run).items())
    facts = f"{_state_text(run)}, created {_created_text(run)}\n{origins}store: {run.store_uri}\n{code}\n"
    if run.switches:
        facts += f"{_switches_text(run)}\n"
    options.show(run, lambda _: f"{facts}\n{run.recipe_yaml}")


@app.command()
@grouped_options
def wait(options: ServerOptions, run_id: RunArgument) -> None:
    """Follow RUN until it is finished; says how far it is every 30 s."""
    with options.client() as client:
        _follow(client, run_id)


@app.command()
@grouped_options
def stop(options: ServerOptions, run_id: RunArgument, wait: WaitOption = False) -> None:
    """Stop RUN after the steps in hand: trainers publish, write a checkpoint and end, the newest versions are
    evaluated, nodes leave. Everything is kept: `astraflow runs resume` goes on.

    Example: astraflow runs stop my-run --wait
    """
    _update(options, run_id, run_pb2.RUN_STATE_FINISHING, wait=wait)


@app.command()
@grouped_options
def resume(options: ServerOptions, run_id: RunArgument, wait: WaitOption = False) -> None:
    """Continue RUN, which was stopped or has finished: start its trainers again, with --steps to go beyond the recipe.

    Example: astraflow runs resume my-run
    """
    _update(options, run_id, run_pb2.RUN_STATE_ACTIVE, wait=wait)


@app.command()
@grouped_options
def switch(
    options: ServerOptions,
    run_id: RunArgument,
    overrides: SetOption = None,
    recipe: Annotated[
        Path | None,
        typer.Option("--recipe", metavar="RECIPE", help="Go on with this one. Default: that of RUN."),
    ] = None,
) -> None:
    """Switch curators, filters, selector, routes or needs of batches of RUN while it goes on, at the end of the step in
    hand. `astraflow runs show` has when each switch took effect.

    Example: astraflow runs switch my-run --set dataflow.filters=[]
    """
    with options.client() as client:
        run = client.call(client.runs.GetRun, pb.GetRunRequest(run_id=run_id)).run
        text = run.switched_recipe_yaml or run.recipe_yaml
        source = f"recipe of run {run_id}"
        loaded = (
            load_recipe(recipe, overrides=overrides or ())
            if recipe
            else parse_recipe(text, source=source, overrides=overrides or ())
        )
        request = pb.UpdateRunRequest(run_id=run_id, recipe_yaml=loaded.yaml_text)
        run = client.call(client.runs.UpdateRun, request).run
    options.show(run, lambda switched: _switches_text(switched) or "nothing differs")


@app.command()
@grouped_options
def fork(
    options: ServerOptions,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The run to begin from.")],
    run_id: Annotated[str, typer.Argument(metavar="NEW", help="Name of the new run.")],
    step: Annotated[
        int, typer.Option("--from-step", metavar="N", min=0, help="Step of SOURCE after which it begins.")
    ],
    overrides: SetOption = None,
    store: Annotated[
        str, typer.Option("--store", metavar="URI", help="Weight store of NEW. Default: that of SOURCE.")
    ] = "",
    probe: Annotated[
        bool, typer.Option(help="Look into the stores from here; else trainers find out what is missing.")
    ] = True,
) -> None:
    """Create the run NEW, whose policies start with the weights that they had in SOURCE after step N.

    It has SOURCE's recipe, with the --set values, and counts its steps from 0. SOURCE goes on as before; the versions
    that NEW needs are pinned there. Example: astraflow runs fork base colder --from-step 40 --set
    trainer.optimizer.learning_rate=1e-5
    """
    with options.client() as client:
        if store and probe:
            say(prepare_store(store), err=True)
        created = fork_run(
            *(client, source),
            run_id=run_id,
            step=step,
            overrides=overrides or (),
            store_uri=store,
            check_store=probe,
        )
        origins = origins_of(created)
    if options.json_:
        starts = {name: start.model_dump(mode="json") for name, start in origins.items()}
        print_json({**_without_content(created), "starts": starts})
        return
    say(_state_text(created))
    for name, start in origins.items():
        say(_origin_text(name, start))
    say(
        "optimizers start fresh; a trainer that is started with --source-work-dir FOLDER goes on with that of SOURCE's "
        "checkpoint of this step",
        err=True,
    )


@app.command("list")
@grouped_options
def list_(
    options: ServerOptions,
) -> None:
    """List the server's runs, oldest first."""
    with options.client() as client:
        runs = list(all_runs(client))
    if options.json_:
        print_json([_without_content(run) for run in runs])
        return
    if not runs:
        say("the server has no run; start one: astraflow dev RECIPE, or astraflow runs create RECIPE")
        return
    console().print(runs_table(runs))


@app.command()
@grouped_options
def delete(
    options: ServerOptions,
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="Run to delete.")],
    force: Annotated[
        bool, typer.Option("--force", help="Delete it although nodes or trainers work on it.")
    ] = False,
) -> None:
    """Delete RUN with everything the server stores for it; published weights stay in the object store."""
    with options.client() as client:
        answer = client.call(
            client.runs.DeleteRun,
            pb.DeleteRunRequest(run_id=run_id, force=force),
            timeout_s=_DELETE_TIMEOUT_S,
        )
    options.show(answer, lambda deleted: _deleted_text(run_id, deleted))


def _switches_text(run: run_pb2.Run) -> str:
    """A line for each change of plug-ins, oldest first."""
    lines = []
    for switch in run.switches:
        steps = ", ".join(f"{name} step {step}" for name, step in sorted(switch.steps.items()))
        when = f"since {steps}" if switch.HasField("effect_time") else "not in effect"
        lines.append(f"switch {switch.number} by {switch.requested_by}, {when}: {'; '.join(switch.changes)}")
    return "\n".join(lines)


def _origin_text(policy_id: str, start: StoredVersionSettings) -> str:
    return origin_text(policy_id, run=start.run, policy=start.policy, version=start.version, step=start.step)


def _deleted_text(run_id: str, answer: pb.DeleteRunResponse) -> str:
    trained = count_text(answer.trajectories.trained)
    return f"run {run_id} is deleted: {trained} trajectories had been trained, {answer.deleted_keys} keys removed"


def all_runs(client: Client) -> Iterator[run_pb2.Run]:
    """Yield every run of the server."""
    request = pb.ListRunsRequest(page_size=_PAGE)
    for page in client.pages(client.runs.ListRuns, request):
        yield from page.runs


def _update(options: ServerOptions, run_id: str, state: run_pb2.RunState.ValueType, *, wait: bool) -> None:
    with options.client() as client:
        request = pb.UpdateRunRequest(run_id=run_id, state=state)
        run = client.call(client.runs.UpdateRun, request).run
        _say(options, run)
        if wait:
            _follow(client, run_id)


def _follow(client: Client, run_id: str) -> None:
    """Say how the run goes, at each change of its state and every 30 s, until it is finished."""
    state, said_s, stopped_for = run_pb2.RUN_STATE_UNSPECIFIED, float("-inf"), ""
    for status in follow(client, run_id=run_id):
        stopped_for = status.stopped_for
        if status.state != state or time.monotonic() - said_s >= _SAY_EVERY_S:
            state, said_s = status.state, time.monotonic()
            say(_progress_text(status))
    if stopped_for:
        raise PreconditionError(f"run {run_id} was stopped: {stopped_for}")
    if state != run_pb2.RUN_STATE_FINISHED:
        raise PreconditionError(f"run {run_id} is followed no more, and was not finished yet")


def _progress_text(status: admin_service_pb2.StatusResponse) -> str:
    state = enum_text(run_pb2.RunState.DESCRIPTOR, status.state)
    policies = [
        f"{policy.policy_id} step {policy.last_finished_step}"
        + (f", version {policy.version.version}" if policy.HasField("version") else "")
        + f", reward {number_text(policy.recent_training_reward)}"
        for policy in status.policies
        if not policy.frozen
    ]
    final = [
        f"{item.policy_id} held-out reward {number_text(item.mean_reward)} at version {item.version}"
        for item in status.evaluations
        if item.final and item.complete
    ]
    return f"run {status.run_id} is {state}: " + "; ".join([*policies, *final])


def runs_table(runs: Iterable[run_pb2.Run]) -> Table:
    """Return a row for each run: state, when it was created, its store."""
    shown = table("run", "state", "created", "store")
    for run in runs:
        shown.add_row(run.run_id, _state(run), _created_text(run), run.store_uri)
    return shown


def _state(run: run_pb2.Run) -> str:
    return enum_text(run_pb2.RunState.DESCRIPTOR, run.state)


def _state_text(run: run_pb2.Run) -> str:
    stopped = f", stopped: {run.stopped_for}" if run.stopped_for else ""
    return f"run {run.run_id} is {_state(run)}{stopped}"


def _created_text(run: run_pb2.Run) -> str:
    return run.create_time.ToDatetime().strftime("%Y-%m-%d %H:%M:%S UTC")


def _say(options: ServerOptions, run: run_pb2.Run) -> None:
    if options.json_:
        print_json(_without_content(run))
    else:
        say(_state_text(run))


def _without_content(run: run_pb2.Run) -> dict[str, object]:
    """A run without its recipe and code, which are pages long."""
    return {key: value for key, value in as_json(run).items() if key not in ("recipe_yaml", "code")}
