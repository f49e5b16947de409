"""Groups: what a complete task's trajectories become.

A group is all trajectories of one task for one (policy, role). Pure: filters are passed in. Either a whole
group becomes ready or all of it is dropped for one reason. Called by `settling` with what the store returned.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

from astraflow.dataflow.v1 import batch_pb2
from astraflow.plugins import Filter, Group, TrajectorySummary
from astraflow.rollout.v1 import trajectory_pb2
from astraflow_dataflow.records import CompleteTask
from astraflow_dataflow.rules.faults import PluginFaults
from astraflow_dataflow.rules.tasks import task_spec
from astraflow_kit.log import get_logger

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
    faults: PluginFaults = field(default_factory=PluginFaults)
    clock: Callable[[], float] = time.perf_counter


def group_id(task_id: str, *, policy_id: str, role: str) -> str:
    """Return the id of the group of one (policy, role) of a task; the role named like the policy may be left out."""
    return f"{task_id}/{policy_id}" if role in ("", policy_id) else f"{task_id}/{policy_id}/{role}"


def placed_headers(episode: trajectory_pb2.Episode) -> Iterator[trajectory_pb2.TrajectoryHeader]:
    """Yield copies of an episode's headers, in its order, that say which member and turn they are of."""
    turns: Counter[tuple[str, str]] = Counter()
    for item in episode.trajectories:
        header = trajectory_pb2.TrajectoryHeader()
        header.CopyFrom(item.header)
        part = header.policy_id, header.role or header.policy_id
        header.member, header.turn = episode.member, turns[part]
        turns[part] += 1
        yield header


def groups_of(task_id: str, *, spec: bytes, headers: Mapping[str, bytes]) -> list[Group]:
    """Return the groups of a task in a fixed order; `spec` is its serialized Task, `headers` are those pushed, by id.

    Their trajectories are the headers as pushed, which have all that a TrajectorySummary has.
    """
    grouped: dict[tuple[str, str], list[trajectory_pb2.TrajectoryHeader]] = {}
    for trajectory_id in sorted(headers):
        header = trajectory_pb2.TrajectoryHeader.FromString(headers[trajectory_id])
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


def judge(task: CompleteTask, rules: Rules) -> list[str]:
    """Return `ready` or why it is dropped for each of the task's groups, in their order."""
    reason = incomplete_reason(task, min_members=rules.min_members)
    return [reason or _verdict(task, group, rules=rules) for group in task.groups]


def was_judged(verdict: str) -> bool:
    """Whether the filters decided, so that the acceptance average moves."""
    return verdict in (READY, FILTERED)


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
    return filter_verdict(group, rules=rules)


def filter_verdict(group: Group, *, rules: Rules) -> str:
    """Return `filtered` when a filter refuses the group, `filter_failed` when one raises or answers no bool, else
    `ready`.
    """
    for name, keep in rules.filters:
        started_s = rules.clock()
        try:
            kept = keep(group)
            if kept not in (True, False):
                raise TypeError(f"it returned {type(kept).__name__}, not True or False")
        except (
            Exception
        ) as error:  # a plug-in must not stop the run; the group is dropped under its own reason
            log.exception("filter.failed", filter=name, group_id=group.group_id)
            rules.faults.note("filter", name, error)
            return "filter_failed"
        took_s = rules.clock() - started_s
        if took_s > SLOW_FILTER_S:
            rules.faults.note_slow("filter", name, took_s, limit_s=SLOW_FILTER_S)
        if not kept:
            return FILTERED
    return READY


def items_of(task_id: str, group: Group) -> batch_pb2.Batch:
    """Return what a batch says of a group: one item for each of its trajectories."""
    return batch_pb2.Batch(
        items=[
            batch_pb2.BatchItem(
                trajectory_id=header.trajectory_id,
                group_id=group.group_id,
                task_id=task_id,
                num_tokens=header.num_tokens,
                num_trainable_tokens=header.num_trainable_tokens,
                reward=header.reward,
                min_version=header.min_version,
                max_version=header.max_version,
                role=group.role,
                source=group.task.source,
                member=header.member,
                turn=header.turn,
                truncated=header.finish_reason == TRUNCATED,
            )
            for header in cast("tuple[trajectory_pb2.TrajectoryHeader, ...]", group.trajectories)
        ]
    )
