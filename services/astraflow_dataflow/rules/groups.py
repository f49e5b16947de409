"""Groups: what a complete task's trajectories become.

A group is all trajectories of one task for one (policy, role). Pure: filters are passed in. Either a whole
group becomes ready or all of it is dropped for one reason. Called by `settling` with what the store returned.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import cast

from astraflow.dataflow.v1 import batch_pb2
from astraflow.errors import UnavailableError
from astraflow.plugins import Filter, Group, TrajectorySummary
from astraflow.recipe.groups import RouteSettings
from astraflow.rollout.v1 import trajectory_pb2
from astraflow_dataflow.records import CompleteTask
from astraflow_dataflow.rules.faults import PluginFaults
from astraflow_dataflow.rules.routes import route_verdict, was_routed
from astraflow_dataflow.rules.shadows import Shadows
from astraflow_dataflow.rules.tasks import task_spec
from astraflow_kit.log import get_logger
from astraflow_kit.plugins import RAISED

log = get_logger(__name__)

READY, FILTERED = "ready", "filtered"
TRUNCATED = "length"
"""Finish reason of an answer that a limit of tokens cut off."""
SLOW_FILTER_S = 0.1
"""A filter that takes longer is a fault: the server answers nobody meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the recipe says about complete tasks. `filters` are (name, plug-in) in order."""

    min_members: int | None
    filters: tuple[tuple[str, Filter], ...]
    shadow_filters: tuple[tuple[str, Filter], ...] = ()
    """Asked about every group that the filters judge, and obeyed by nobody."""
    routes: tuple[RouteSettings, ...] = ()
    """Where groups go that the filters do not see; in order."""
    faults: PluginFaults = field(default_factory=PluginFaults)
    shadows: Shadows = field(default_factory=Shadows)
    clock: Callable[[], float] = time.perf_counter
    now: Callable[[], datetime] = lambda: datetime.now(UTC)


def group_id(task_id: str, *, policy_id: str, role: str) -> str:
    """Return the id of the group of one (policy, role) of a task; the role named like the policy may be left out."""
    return f"{task_id}/{policy_id}" if role in ("", policy_id) else f"{task_id}/{policy_id}/{role}"


def placed_headers(episode: trajectory_pb2.Episode) -> Iterator[trajectory_pb2.TrajectoryHeader]:
    """Yield copies of an episode's headers, in its order, that say which member, turn and node they are of."""
    turns: Counter[tuple[str, str]] = Counter()
    for item in episode.trajectories:
        header = trajectory_pb2.TrajectoryHeader()
        header.CopyFrom(item.header)
        part = header.policy_id, header.role or header.policy_id
        header.member, header.turn, header.node_id = episode.member, turns[part], episode.node_id
        turns[part] += 1
        yield header


def groups_of(
    task_id: str, *, spec: bytes, headers: Iterable[trajectory_pb2.TrajectoryHeader]
) -> list[Group]:
    """Return the groups of a task in a fixed order; `spec` is its serialized Task, `headers` are those pushed.

    Their trajectories are the headers as pushed, which have all that a TrajectorySummary has.
    """
    grouped: dict[tuple[str, str], list[trajectory_pb2.TrajectoryHeader]] = {}
    for header in sorted(headers, key=lambda header: header.trajectory_id):
        grouped.setdefault((header.policy_id, header.role or header.policy_id), []).append(header)
    if not grouped:
        return []
    task = task_spec(spec)
    return [
        Group(
            task=task,
            trajectories=cast("tuple[TrajectorySummary, ...]", tuple(members)),
            policy=policy_id,
            role=role,
            group_id=group_id(task_id, policy_id=policy_id, role=role),
        )
        for (policy_id, role), members in sorted(grouped.items())
    ]


def complete_task(
    task_id: str,
    *,
    spec: bytes,
    headers: Iterable[trajectory_pb2.TrajectoryHeader],
    group_size: int,
    num_finished: int,
    why: str = "",
    credited: frozenset[str] | None = None,
) -> CompleteTask:
    """Return a complete task with its groups; `spec` is its serialized Task, `headers` are those pushed."""
    groups = groups_of(task_id, spec=spec, headers=headers)
    return CompleteTask(
        task_id=task_id,
        why=why,
        credited=credited,
        group_size=group_size,
        num_finished=num_finished,
        groups=groups,
        items=[items_of(task_id, group) for group in groups],
    )


def judge(task: CompleteTask, rules: Rules) -> list[str]:
    """Return what becomes of each of the task's groups, in their order: `ready`, why it is dropped, or which route took
    it.
    """
    reason = incomplete_reason(task, min_members=rules.min_members)
    return [reason or _verdict(task, group, rules=rules) for group in task.groups]


def was_judged(verdict: str) -> bool:
    """Whether filters or routes decided, so that the acceptance average moves."""
    return verdict in (READY, FILTERED) or was_routed(verdict)


def incomplete_reason(task: CompleteTask, *, min_members: int | None) -> str:
    """Return why the task's groups cannot be used, or an empty string when they can."""
    if task.why == "run_finished":
        return "run_finished"
    if task.num_finished == task.group_size:
        return ""
    if min_members is not None and task.num_finished >= min_members:
        return ""
    return "expired" if task.why == "expired" else "incomplete"


def _verdict(task: CompleteTask, group: Group, *, rules: Rules) -> str:
    if task.credited is not None and group.role not in task.credited:
        return "no_credit"
    routed = route_verdict(group, rules.routes, now=rules.now())
    return routed or filter_verdict(group, rules=rules)


def filter_verdict(group: Group, *, rules: Rules) -> str:
    """Return `filtered` when a filter refuses the group, `filter_failed` when one raises or answers no bool, else
    `ready`. Shadow filters are asked, too, and counted.
    """
    verdicts = (_judged(group, name, keep, rules=rules) for name, keep in rules.filters)
    verdict = next((verdict for verdict in verdicts if verdict != READY), READY)
    for name, keep in rules.shadow_filters:
        would_be = _judged(group, name, keep, rules=rules)
        if was_judged(would_be) and was_judged(verdict):
            refused = int(would_be != READY)
            rules.shadows.note("filter", name, asked=1, differs=int(would_be != verdict), refused=refused)
    return verdict


def _judged(group: Group, name: str, keep: Filter, *, rules: Rules) -> str:
    """What one filter makes of a group."""
    started_s = rules.clock()
    try:
        kept = keep(group)
        if kept not in (True, False):
            raise TypeError(f"it returned {type(kept).__name__}, not True or False")
    except UnavailableError:  # it was not asked
        raise
    except RAISED as error:  # a plug-in must not stop the run; the group is dropped under its own reason
        log.exception("filter.failed", filter=name, group_id=group.group_id)
        rules.faults.note("filter", name, error)
        return "filter_failed"
    took_s = rules.clock() - started_s
    if took_s > SLOW_FILTER_S:
        rules.faults.note_slow("filter", name, took_s, limit_s=SLOW_FILTER_S)
    return READY if kept else FILTERED


def items_of(task_id: str, group: Group) -> batch_pb2.Batch:
    """Return what a batch says of a group: one item for each of its trajectories."""
    headers = cast("tuple[trajectory_pb2.TrajectoryHeader, ...]", group.trajectories)
    item = partial(item_of, task_id, group_id=group.group_id, source=group.task.source)
    return batch_pb2.Batch(items=map(item, headers))


def item_of(
    task_id: str, header: trajectory_pb2.TrajectoryHeader, *, group_id: str, source: str = ""
) -> batch_pb2.BatchItem:
    """Return what a batch says of a trajectory."""
    return batch_pb2.BatchItem(
        trajectory_id=header.trajectory_id,
        group_id=group_id,
        task_id=task_id,
        num_tokens=header.num_tokens,
        num_trainable_tokens=header.num_trainable_tokens,
        reward=header.reward,
        min_version=header.min_version,
        max_version=header.max_version,
        role=header.role or header.policy_id,
        source=source,
        member=header.member,
        turn=header.turn,
        truncated=header.finish_reason == TRUNCATED,
        response_digest=header.response_digest,
        node_id=header.node_id,
    )
