"""`astraflow nodes`: list the nodes of a run, drain one, or take that back."""

import time
from collections.abc import Iterator
from typing import Annotated

import typer

from astraflow.client import Client
from astraflow.commands.options import grouped_options
from astraflow.commands.server import RunOptions
from astraflow.commands.status import node_state, serves_text
from astraflow.commands.wording import as_json, console, print_json, seconds_of, span_text, table
from astraflow.dataflow.v1 import admin_service_pb2 as pb
from astraflow.dataflow.v1 import version_pb2

app = typer.Typer(add_completion=False, help="List the nodes of a run, drain one, or take that back.")

_PAGE = 1000
_MTOK_PER_TOK_H = 1e6 / 3600


@app.callback(invoke_without_command=True)
@grouped_options
def nodes(
    context: typer.Context,
    options: RunOptions,
) -> None:
    """List the nodes that joined: where and what they are, what they serve, take and sample."""
    if context.invoked_subcommand is not None:
        return
    with options.client() as client:
        found = list(all_nodes(client, run_id=options.run_id))
    if options.json_:
        print_json([as_json(node) for node in found])
        return
    if not found:
        typer.echo("no node has joined; start one: astraflow raas --join HOST:PORT")
        return
    figures = ("price/h", "leases", "credits", "at once", "tokens/s", "a task", "per Mtok")
    shown = table(
        *("node", "state", "where", "hardware", "price/h", "serves"),
        *("leases", "credits", "at once", "bounded by", "tokens/s", "a task", "per Mtok", "last seen"),
        right=figures,
    )
    for node in found:
        shown.add_row(*_cells(node))
    console().print(shown)
    typer.echo(
        "credits: tasks that it takes now; at once: episodes; a task: mean time of one; "
        "per Mtok: price of a million sampled tokens"
    )
    for line in (line for node in found for line in _notes(node)):
        typer.echo(line)


def _notes(node: pb.NodeStatus) -> Iterator[str]:
    """What is to be said of a node beside its row."""
    if node.poisoned:
        drained = "; it is drained for them" if node.drain_reason == "poison" else ""
        yield f"{node.node_id}: {node.poisoned} episodes were refused as poison{drained}"
    if node.refused:
        yield f"{node.node_id}: {node.refused} episodes were not leased to it and were refused ({node.refused_for})"
    for fault in node.weight_faults:
        yield f"{node.node_id}: {_fault_text(fault)}"
    for load in node.engine_loads:
        if load.fault:
            yield f"{node.node_id}: counts its own calls for {load.policy_id}: {load.fault}"


def _cells(node: pb.NodeStatus) -> tuple[str, ...]:
    priced = node.HasField("price_per_hour")
    cost = node.price_per_hour / node.tokens_per_s * _MTOK_PER_TOK_H if priced and node.tokens_per_s else None
    task_s = node.task_duration.ToNanoseconds() / 1e9
    seen_s = max(0.0, time.time() - seconds_of(node.last_seen_time))
    return (
        node.node_id,
        node_state(node),
        "/".join(filter(None, (node.region, node.pool))) or "–",
        node.hardware or "–",
        f"{node.price_per_hour:.2f}" if priced else "–",
        serves_text(node),
        str(node.leases),
        str(node.credits) if node.connected else "–",
        str(node.max_episodes) if node.connected and node.max_episodes else "–",
        node.bounded_by if node.connected and node.bounded_by else "–",
        f"{node.tokens_per_s:,.0f}" if node.connected else "–",
        span_text(task_s) if task_s else "–",
        f"{cost:.2f}" if cost is not None else "–",
        f"{span_text(seen_s)} ago",
    )


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


@app.command()
@grouped_options
def undrain(
    options: RunOptions,
    node: Annotated[str, typer.Argument(metavar="NODE", help="Node that was drained.")],
) -> None:
    """Let NODE, drained for poison or not gone yet, have tasks again."""
    request = pb.UndrainNodeRequest(run_id=options.run_id, node_id=node)
    with options.client() as client:
        answer = client.call(client.admin.UndrainNode, request)
    options.show(answer, lambda undrained: _undrain_text(node, undrained))


def _undrain_text(node: str, answer: pb.UndrainNodeResponse) -> str:
    if not answer.drain_reason:
        return f"{node} was not drained"
    return f"{node} may have tasks again; it was drained for {answer.drain_reason}"


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
