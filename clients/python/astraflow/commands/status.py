"""`astraflow status`: the state of a run on one page, or as JSON; `--watch` follows it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from astraflow._contract.printable import printable_json
from astraflow.client import Client
from astraflow.commands.options import grouped_options
from astraflow.commands.server import RunOptions
from astraflow.commands.waits import in_order
from astraflow.commands.wording import (
    Printable,
    as_json,
    console,
    count_text,
    enum_text,
    heading,
    number_text,
    origin_text,
    say,
    seconds_of,
    span_text,
    table,
)
from astraflow.dataflow.v1 import admin_service_pb2 as pb
from astraflow.dataflow.v1 import run_pb2
from astraflow.errors import RetryableError

app = typer.Typer(add_completion=False)

PLACES = (
    ("trained", "trained"),
    ("in_batch", "in a batch"),
    ("ready", "ready"),
    ("assembling", "in unfinished groups"),
    ("evaluated", "evaluated"),
)
_WIDE = 100
"""Columns from which on the table of policies is one."""
_MAX_EVALUATIONS = 6
_MAX_FAILURES = 3

WatchOption = Annotated[
    bool,
    typer.Option("--watch", help="Follow the run until it is finished; with --json, one object per line."),
]


@app.command()
@grouped_options
def status(
    options: RunOptions,
    watch: WatchOption = False,
) -> None:
    """Show what a run has done and holds: policies, trajectories, nodes, evaluations, waits."""
    with options.client() as client:
        if watch:
            _show_all(follow(client, run_id=options.run_id), as_lines=options.json_)
            return
        answer = client.call(client.admin.Status, pb.StatusRequest(run_id=options.run_id))
    options.show(answer, status_page)


def follow(client: Client, *, run_id: str, pause_s: float = 1.0) -> Iterator[pb.StatusResponse]:
    """Yield the status at once and after each change until the run is finished.

    A server that was reached once is waited for when it goes away. Raises what it refuses with.
    """
    request, reached = pb.AdminServiceWatchRequest(run_id=run_id), False
    while True:
        try:
            for change in client.stream(client.admin.Watch, request):
                reached = True
                yield change.status
                if change.status.state == run_pb2.RUN_STATE_FINISHED:
                    return
        except RetryableError as error:
            if not reached:
                raise
            say(f"the server does not answer, retrying: {error.message}", err=True)
        time.sleep(pause_s)


def _show_all(statuses: Iterator[pb.StatusResponse], *, as_lines: bool) -> None:
    """Redraw on a terminal, write page after page into a pipe, or one JSON object per line."""
    output = console()
    with suppress(KeyboardInterrupt):
        if as_lines:
            for status in statuses:
                typer.echo(printable_json(json.dumps(as_json(status), ensure_ascii=False)))
        elif output.is_terminal:
            with Live(console=output, auto_refresh=False) as live:
                for status in statuses:
                    live.update(Printable(status_page(status)), refresh=True)
        else:
            for status in statuses:
                output.print(status_page(status), end="\n\n")


def status_page(status: pb.StatusResponse) -> RenderableType:
    """Return the page; parts that have nothing to say are left out."""
    parts: list[RenderableType] = [title_of(status)]
    parts += [
        *stop_parts(status.stopped_for),
        *failure_parts(status.failures, dead_letters=status.dead_letters),
    ]
    parts += [
        *policy_parts(status),
        *trajectory_parts(status),
        *node_parts(status),
        *evaluation_parts(status),
    ]
    parts += [*data_parts(status), *wait_parts(status)]
    return Group(*parts)


def title_of(status: pb.StatusResponse) -> Text:
    """Return which run it is, and its state."""
    state = enum_text(run_pb2.RunState.DESCRIPTOR, status.state)
    return Text.assemble(("run ", "bold"), (status.run_id, "bold"), f" is {state}")


def stop_parts(stopped_for: str) -> list[RenderableType]:
    """Return why the server stopped the run; nothing when it did not."""
    return [Text(f"stopped: {stopped_for}", style="bold red")] if stopped_for else []


def policy_parts(status: pb.StatusResponse, *, width: int = _WIDE) -> list[RenderableType]:
    """Return the table of policies: progress, versions, staleness and groups; nothing before there is one. Below the
    other where `width` columns do not hold both halves.
    """
    if not status.policies:
        return []
    progress = ("step", "version", "changed", "reward", "staleness")
    groups = ("ready", "sampling", "unpublished", "room")
    halves = [(*progress, *groups)] if width >= _WIDE else [progress, groups]
    tables = [table("policy", *half, right=[name for name in half if name != "staleness"]) for half in halves]
    for policy in status.policies:
        cells = _policy_cells(policy)
        for half, shown in zip(halves, tables, strict=True):
            shown.add_row(policy.policy_id + _kind(policy), *(cells[name] for name in half))
    rated = [Text(f"  {_ratings(policy)}") for policy in status.policies if policy.ratings]
    began = [Text(f"  {_origin(policy)}") for policy in status.policies if policy.HasField("origin")]
    note = "  changed: weights that the newest version changed; ready … room: groups of tasks"
    return [heading("policies"), *tables, *rated, *began, Text(note, style="dim")]


def _policy_cells(policy: pb.PolicyStatus) -> Mapping[str, str]:
    return {
        "step": str(policy.last_finished_step),
        "version": _version(policy),
        "changed": f"{policy.version.density:.1%}" if policy.version.version else "–",
        "reward": number_text(policy.recent_training_reward),
        "staleness": _staleness(policy),
        "ready": str(policy.ready_groups),
        "sampling": str(policy.outstanding_groups),
        "unpublished": str(policy.unpublished_groups),
        "room": str(policy.credit),
    }


def _ratings(policy: pb.PolicyStatus) -> str:
    """The trained policy's rating and those of the versions that it met, the newest eight."""
    of = policy.version.snapshot_of
    own = "".join(f"{of} {item.rating:.0f}" for item in policy.ratings if not item.HasField("version"))
    met = [f"@{item.version} {item.rating:.0f}" for item in policy.ratings if item.HasField("version")][-8:]
    return f"ratings of {policy.policy_id}: {own}; {', '.join(met)}"


def _origin(policy: pb.PolicyStatus) -> str:
    start = policy.origin
    return origin_text(
        policy.policy_id,
        run=start.run_id,
        policy=start.policy_id,
        version=start.version,
        step=start.step if start.HasField("step") else None,
    )


def _kind(policy: pb.PolicyStatus) -> str:
    if policy.waits_for_turn_of:
        return f" (frozen, {policy.waits_for_turn_of}'s turn)"
    return " (external)" if policy.external else " (not trained)" if policy.frozen else ""


def _version(policy: pb.PolicyStatus) -> str:
    if not policy.HasField("version"):
        return "–"
    of = policy.version.snapshot_of
    return f"{of}@{policy.version.snapshot_version}" if of else str(policy.version.version)


def _staleness(policy: pb.PolicyStatus) -> str:
    ages = policy.staleness
    return f"median {ages.p50:g}, largest {ages.max}" if policy.last_finished_step else "–"


def trajectory_parts(status: pb.StatusResponse) -> list[RenderableType]:
    """Return where the trajectories are and whether all are accounted for; nothing before the first."""
    account = status.trajectories
    if not account.ingested:
        return []
    terms = [
        f"{count_text(getattr(account, name))} {word}" for name, word in PLACES if getattr(account, name)
    ]
    dropped = sum(account.dropped.values())
    if dropped:
        reasons = ", ".join(f"{reason} {count_text(count)}" for reason, count in _largest(account.dropped))
        terms.append(f"{count_text(dropped)} dropped ({reasons})")
    verdict = (
        Text("  conservation: nothing is lost, the figures add up", style="green")
        if not account.conservation_error
        else Text(
            f"  conservation error {account.conservation_error}: see docs/debugging.md", style="bold red"
        )
    )
    line = f"  {count_text(account.ingested)} arrived = {' + '.join(terms)}"
    return [heading("trajectories"), Text(line), verdict]


def _largest(dropped: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(((reason, count) for reason, count in dropped.items() if count), key=lambda item: -item[1])


def node_parts(status: pb.StatusResponse) -> list[RenderableType]:
    """Return the table of nodes; nothing before the first."""
    if not status.nodes:
        return []
    shown = table(
        *("node", "state", "serves", "leases", "episodes", "tokens", "restarts"),
        right=("leases", "episodes", "tokens", "restarts"),
    )
    for node in status.nodes:
        shown.add_row(*node_cells(node))
    return [heading("nodes"), shown]


def node_cells(node: pb.NodeStatus) -> tuple[str, ...]:
    """Return a node's row: id, state, what it serves, and its figures."""
    figures = (str(node.leases), count_text(node.episodes), count_text(node.tokens), str(node.restarts))
    return (node.node_id, node_state(node), serves_text(node), *figures)


def serves_text(node: pb.NodeStatus) -> str:
    """Return the version of each policy on a node, and by how many it is behind."""
    serves = (
        f"{policy} {version}" + (f" ({lag} behind)" if (lag := node.version_lags.get(policy, 0)) else "")
        for policy, version in sorted(node.serving_versions.items())
    )
    return ", ".join(serves) or "–"


def node_state(node: pb.NodeStatus) -> str:
    """Return what a node does, in words."""
    if not node.connected:
        return f"gone for {span_text(max(0.0, time.time() - seconds_of(node.last_seen_time)))}"
    if node.drain_reason:
        return f"draining: {node.drain_reason}"
    return f"waits: {node.waiting_for}" if node.waiting_for else "working" if node.leases else "idle"


def evaluation_parts(status: pb.StatusResponse) -> list[RenderableType]:
    """Return the table of evaluations, the newest; nothing before the first."""
    if not status.evaluations:
        return []
    columns = ("evaluation", "version", "held-out reward", "samples", "roles and metrics")
    shown = table(*columns, right=("version", "held-out reward"))
    left_out = len(status.evaluations) - _MAX_EVALUATIONS
    for item in status.evaluations[-_MAX_EVALUATIONS:]:
        samples = f"{item.num_samples} of {item.num_planned}"
        name = f"{item.policy_id}, final" if item.final else item.policy_id
        cells = (str(item.version), number_text(item.mean_reward), samples, evaluation_details(item))
        shown.add_row(name, *cells)
    more = [Text(f"  and {left_out} earlier ones", style="dim")] if left_out > 0 else []
    return [heading("evaluations"), shown, *more]


def evaluation_details(item: pb.Evaluation) -> str:
    """Return the rewards of several roles, and the metrics of the episodes, as text; empty when there is neither."""
    roles = {role.role: role.mean_reward for role in item.roles} if len(item.roles) > 1 else {}
    named = [*roles.items(), *sorted(item.metrics.items())]
    return ", ".join(f"{name} {number_text(mean)}" for name, mean in named)


def wait_parts(status: pb.StatusResponse) -> list[RenderableType]:
    """Return the table of waits; nothing for a run that has finished."""
    if status.state == run_pb2.RUN_STATE_FINISHED:
        return []
    if not status.waits:
        return [heading("waits"), Text("  nothing waits")]
    shown = table("stage", "policy", "waits for", "waited", "figures", right=("waited",))
    for wait in in_order(status.waits):
        since = span_text(seconds_of(wait.waited_duration))
        shown.add_row(wait.stage, wait.policy_id, wait.reason, since, wait.detail)
    return [heading("waits"), shown, Text("  `astraflow why` says what would end them", "dim")]


def data_parts(answer: pb.StatusResponse | pb.WhyResponse) -> list[RenderableType]:
    """Return where routes took groups, what shadow plug-ins would have decided, and how many nodes there should be;
    nothing where there are none.
    """
    routed = [
        f"{count.verdict}: {count_text(count.groups)} groups of {count.policy_id}, mean reward "
        f"{number_text(count.mean_reward)}"
        for count in answer.routes
    ]
    lines = [*routed, *map(_shadow_text, answer.shadows)]
    shown: list[RenderableType] = []
    if lines:
        shown += [heading("routes and shadow plug-ins"), *(Text(f"  {line}") for line in lines)]
    if answer.HasField("autoscaling"):
        shown += [heading("autoscaling"), Text(f"  {_autoscaling_text(answer.autoscaling)}")]
    return shown


def _autoscaling_text(state: pb.Autoscaling) -> str:
    pools = ", ".join(f"{nodes} in {pool}" for pool, nodes in sorted(state.pools.items()))
    changes = f"grew {state.grown} times, shrank {state.shrunk} times, turned {state.turns} times"
    return f"{state.nodes} of {state.target_nodes} nodes ({pools}); {state.reason}; {changes}"


def _shadow_text(shadow: pb.ShadowPlugin) -> str:
    asked, differs = count_text(shadow.asked), count_text(shadow.differs)
    if shadow.kind == "selector":
        return f"shadow {shadow.name} would have chosen {differs} of {asked} groups otherwise"
    verb, what = ("skipped", "tasks") if shadow.kind == "curator" else ("dropped", "groups")
    decided = f"shadow {shadow.name} would have {verb} {count_text(shadow.refused)} of {asked} {what}"
    return f"{decided}, {differs} otherwise than it went"


def failure_parts(failures: Sequence[pb.TaskFailures], *, dead_letters: int) -> list[RenderableType]:
    """Return what made tasks fail, the most persistent first, and how many were given up; nothing when none failed."""
    parts: list[RenderableType] = [heading("failures")] if failures else []
    for item in failures[:_MAX_FAILURES]:
        parts.append(Text(f"  {failure_text(item)}", style="red" if item.in_a_row else "yellow"))
    if len(failures) > _MAX_FAILURES:
        parts.append(Text(f"  and {len(failures) - _MAX_FAILURES} other kinds", style="dim"))
    if dead_letters:
        text = (
            f"\n{dead_letters} tasks failed and will not be retried: `astraflow dead-letters list` shows why"
        )
        parts.append(Text(text, style="yellow"))
    return parts


def failure_text(item: pb.TaskFailures) -> str:
    """Return one line: what the first one said, where, and how many are like it."""
    row = f", {count_text(item.in_a_row)} in a row" if item.in_a_row else ""
    first = f"; first: task {item.task_id} on {item.node_id}" if item.task_id else ""
    return f"{item.reason}: {item.detail} · {count_text(item.count)} times{row}{first}"
