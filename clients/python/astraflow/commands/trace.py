"""`astraflow trace TASK_ID`: the life of one task, from its leases to the version trained from it, as a tree."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text
from rich.tree import Tree

from astraflow.commands.options import grouped_options
from astraflow.commands.server import RunOptions
from astraflow.commands.wording import enum_text, seconds_of, span_text
from astraflow.dataflow.v1 import admin_service_pb2, trace_pb2

if TYPE_CHECKING:
    from google.protobuf.timestamp_pb2 import Timestamp

app = typer.Typer(add_completion=False)

TaskIdArgument = Annotated[
    str, typer.Argument(metavar="TASK_ID", help="Task, as logs name it in task_id or correlation_id.")
]
_STATES = {
    trace_pb2.TASK_STATE_QUEUED: "waits in its queue",
    trace_pb2.TASK_STATE_LEASED: "is being run",
    trace_pb2.TASK_STATE_RETRY: "waits to be run again",
    trace_pb2.TASK_STATE_COMPLETE: "is complete, its groups are being judged",
    trace_pb2.TASK_STATE_DONE: "is done",
    trace_pb2.TASK_STATE_FORGOTTEN: "finished so long ago that only its id is left",
}


@app.command()
@grouped_options
def trace(
    options: RunOptions,
    task_id: TaskIdArgument,
) -> None:
    """Follow one task: leases, node, episodes, trajectories, batch, step, version."""
    request = admin_service_pb2.WhyRequest(run_id=options.run_id, task_id=task_id)
    with options.client() as client:
        task = client.call(client.admin.Why, request).task
    options.show(task, trace_tree)


def trace_tree(task: trace_pb2.TaskTrace) -> Tree:
    """Return the task's tree; times count from when it was submitted."""
    tree = Tree(_title(task), guide_style="dim")
    shown: set[str] = set()
    for lease in task.leases:
        branch = tree.add(_lease_text(lease, task))
        episodes = [
            item for item in task.episodes if (item.attempt, item.node_id) == (lease.attempt, lease.node_id)
        ]
        shown |= {item.episode_id for item in episodes}
        _add_episodes(branch, episodes, task)
    others = [item for item in task.episodes if item.episode_id not in shown]
    if others:
        _add_episodes(tree.add(Text("pushed outside any recorded lease")), others, task)
    for node_id in task.refused_by:
        tree.add(Text(f"refused by {node_id}: it lacks a capability", style="yellow"))
    if task.truncated:
        tree.add(Text("earlier history is not kept", style="dim"))
    return tree


def _title(task: trace_pb2.TaskTrace) -> Text:
    lane = "training" if task.lane == "train" else f"evaluation {task.lane}" if task.lane else ""
    came = task.group_size - task.missing_members
    words = [_STATES.get(task.state, enum_text(trace_pb2.TaskState.DESCRIPTOR, task.state))]
    words += [lane] if lane else []
    words += [f"{came} of {task.group_size} episodes are in"] if task.group_size else []
    words += [f"closed early: {task.closed_reason}"] if task.closed_reason else []
    return Text.assemble((f"task {task.task_id}", "bold"), " ", " · ".join(words))


def _lease_text(lease: trace_pb2.LeaseTrace, task: trace_pb2.TaskTrace) -> Text:
    copy = "hedge of " if lease.lease_id.endswith(f"#{lease.attempt}-h") else ""
    begun = f"{copy}attempt {lease.attempt} on {lease.node_id}, leased {_after(lease.lease_time, task)}"
    if not lease.HasField("end_time"):
        return Text(f"{begun}, still running")
    lasted = span_text(seconds_of(lease.end_time) - seconds_of(lease.lease_time))
    good = lease.outcome == "completed"
    return Text(f"{begun}, {lease.outcome or 'ended'} after {lasted}", style="" if good else "yellow")


def _add_episodes(
    branch: Tree, episodes: Iterable[trace_pb2.EpisodeTrace], task: trace_pb2.TaskTrace
) -> None:
    for episode in episodes:
        twig = branch.add(_episode_text(episode, task))
        for item in task.trajectories:
            if item.episode_id == episode.episode_id:
                twig.add(_trajectory_text(item))


def _episode_text(episode: trace_pb2.EpisodeTrace, task: trace_pb2.TaskTrace) -> Text:
    outcome = episode.outcome.lower().replace("_", " ")
    why = f" ({episode.reason})" if episode.reason else ""
    failed = ", given up by its workflow" if episode.failed else ""
    pushed = f"pushed {_after(episode.push_time, task)}, {outcome}{why}{failed}"
    good = episode.outcome.startswith("ACCEPTED") and not episode.failed
    return Text(
        f"episode {episode.episode_id} (member {episode.member}) {pushed}", style="" if good else "yellow"
    )


def _trajectory_text(item: trace_pb2.TrajectoryTrace) -> Text:
    role = f" as {item.role}" if item.role else ""
    same = item.min_version == item.max_version
    versions = f"{item.min_version}" if same else f"{item.min_version} to {item.max_version}"
    sampled = f"{item.policy_id}{role}, reward {item.reward:g}, sampled by version {versions}"
    return Text(f"trajectory {item.trajectory_id}: {sampled} → {_place_text(item)}")


def _place_text(item: trace_pb2.TrajectoryTrace) -> str:
    place = enum_text(trace_pb2.TrajectoryPlace.DESCRIPTOR, item.place).replace("_", " ")
    words = [f"dropped: {item.drop_reason}" if item.drop_reason else place]
    words += [f"batch {item.batch_id}, step {item.step}"] if item.batch_id else []
    words += [f"version {item.published_version}"] if item.HasField("published_version") else []
    return " → ".join(words)


def _after(moment: Timestamp, task: trace_pb2.TaskTrace) -> str:
    """When something happened, counted from the task's submission."""
    if not moment.ToNanoseconds():
        return "at an unrecorded time"
    return f"after {span_text(max(0.0, seconds_of(moment) - seconds_of(task.submit_time)))}"
