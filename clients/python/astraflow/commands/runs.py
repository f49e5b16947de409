"""`astraflow runs`: list the runs of a server, or delete one with everything stored for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from astraflow.client import Client
from astraflow.commands.options import grouped_options
from astraflow.commands.server import ServerOptions
from astraflow.commands.wording import as_json, console, count_text, enum_text, print_json, table
from astraflow.dataflow.v1 import run_pb2
from astraflow.dataflow.v1 import run_service_pb2 as pb

app = typer.Typer(no_args_is_help=True, add_completion=False, help="List runs, or delete one.")

_PAGE = 500
_DELETE_TIMEOUT_S = 120.0


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
        typer.echo("the server has no run; start one: astraflow dev RECIPE")
        return
    shown = table("run", "state", "created", "store")
    for run in runs:
        created = run.create_time.ToDatetime().strftime("%Y-%m-%d %H:%M:%S UTC")
        shown.add_row(run.run_id, enum_text(run_pb2.RunState.DESCRIPTOR, run.state), created, run.store_uri)
    console().print(shown)


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


def _deleted_text(run_id: str, answer: pb.DeleteRunResponse) -> str:
    trained = count_text(answer.trajectories.trained)
    return f"run {run_id} is deleted: {trained} trajectories had been trained, {answer.deleted_keys} keys removed"


def all_runs(client: Client) -> Iterator[run_pb2.Run]:
    """Yield every run of the server."""
    request = pb.ListRunsRequest(page_size=_PAGE)
    for page in client.pages(client.runs.ListRuns, request):
        yield from page.runs


def _without_content(run: run_pb2.Run) -> dict[str, object]:
    """A run without its recipe and code, which are pages long."""
    return {key: value for key, value in as_json(run).items() if key not in ("recipe_yaml", "code")}
