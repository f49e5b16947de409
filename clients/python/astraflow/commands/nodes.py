"""`astraflow nodes`: list the nodes of a run, or drain one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from astraflow.client import Client
from astraflow.commands.options import grouped_options
from astraflow.commands.server import RunOptions
from astraflow.commands.status import node_cells
from astraflow.commands.wording import as_json, console, print_json, table
from astraflow.dataflow.v1 import admin_service_pb2 as pb
from astraflow.dataflow.v1 import version_pb2

app = typer.Typer(no_args_is_help=True, add_completion=False, help="List nodes, or drain one.")

_PAGE = 1000


@app.command("list")
@grouped_options
def list_(
    options: RunOptions,
) -> None:
    """List the nodes that joined: what they can do, do and serve."""
    with options.client() as client:
        nodes = list(all_nodes(client, run_id=options.run_id))
    if options.json_:
        print_json([as_json(node) for node in nodes])
        return
    if not nodes:
        typer.echo("no node has joined; start one: astraflow raas --join HOST:PORT")
        return
    shown = table(
        *("node", "state", "serves", "leases", "episodes"),
        *("tokens", "restarts", "capacity", "engine", "pool"),
        right=("leases", "episodes", "tokens", "restarts", "capacity"),
    )
    for node in nodes:
        where = "/".join(filter(None, (node.region, node.pool))) or "–"
        shown.add_row(
            *node_cells(node), str(node.max_concurrent_tasks), ", ".join(node.engines) or "–", where
        )
    console().print(shown)
    for node in nodes:
        for fault in node.weight_faults:
            typer.echo(f"{node.node_id}: {_fault_text(fault)}")


@app.command()
@grouped_options
def drain(
    options: RunOptions,
    node: Annotated[str, typer.Argument(metavar="NODE", help="Node to drain.")],
    reason: Annotated[str, typer.Option(help="Why, one word; the node logs it.")] = "operator",
) -> None:
    """Let NODE finish its leases, give it no more, and make it exit."""
    request = pb.DrainNodeRequest(run_id=options.run_id, node_id=node, reason=reason)
    with options.client() as client:
        answer = client.call(client.admin.DrainNode, request)
    options.show(answer, lambda drained: _drain_text(node, drained))


def _drain_text(node: str, answer: pb.DrainNodeResponse) -> str:
    reached = "it is notified" if answer.connected else "it is not connected and is notified when it is"
    return f"{node} finishes {answer.leases} tasks and leaves; {reached}"


def _fault_text(fault: version_pb2.WeightFault) -> str:
    tile = f", tile {fault.tile}" if fault.HasField("tile") else ""
    tensor = f", tensor {fault.tensor!r}{tile}" if fault.tensor else ""
    return f"cannot activate {fault.policy_id} version {fault.version}{tensor}: {fault.problem}"


def all_nodes(client: Client, *, run_id: str) -> Iterator[pb.NodeStatus]:
    """Yield every node of the run."""
    request = pb.ListNodesRequest(run_id=run_id, page_size=_PAGE)
    for page in client.pages(client.admin.ListNodes, request):
        yield from page.nodes
