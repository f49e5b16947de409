"""Groups: what a complete task's trajectories become.

A group is all trajectories of one task for one (policy, role). Pure: filters are passed in. Either a whole
group becomes ready or all of it is dropped for one reason. Called by `settling` with what the store returned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from astraflow.dataflow.v1 import batch_pb2
from astraflow.plugins import Filter, Group, TrajectorySummary
from astraflow.rollout.v1 import trajectory_pb2
from astraflow_dataflow.records import CompleteTask, GroupVerdict
from astraflow_dataflow.rules.faults import PluginFaults
from astraflow_dataflow.rules.tasks import task_spec
from astraflow_kit.log import get_logger

log = get_logger(__name__)

READY = "ready"
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
    """Return the id of the group of one (policy, role) of a task."""
    return f"{task_id}/{policy_id}/{role}" if role else f"{task_id}/{policy_id}"


def groups_of(task: CompleteTask) -> list[Group]:
    """Return the groups of a complete task, in a fixed order; their verdicts are empty.

    Their trajectories are the headers as pushed, which have all that a TrajectorySummary has.
    """
    grouped: dict[tuple[str, str], list[trajectory_pb2.TrajectoryHeader]] = {}
    for trajectory_id in sorted(task.headers):
        header = trajectory_pb2.TrajectoryHeader.FromString(task.headers[trajectory_id])
        grouped.setdefault((header.policy_id, header.role), []).append(header)
    if not grouped:
        return []
    spec = task_spec(task.spec)
    return [
        Group(
            task=spec,
            trajectories=cast("tuple[TrajectorySummary, ...]", tuple(headers)),
            policy=policy_id,
            role=role,
            group_id=group_id(task.task_id, policy_id=policy_id, role=role),
        )
        for (policy_id, role), headers in sorted(grouped.items())
    ]


def judge(task: CompleteTask, groups: Sequence[Group], rules: Rules) -> list[GroupVerdict]:
    """Return one verdict for each of the task's groups, in their order."""
    reason = incomplete_reason(task, min_members=rules.min_members)
    return [_verdict(task, group, rules=rules, reason=reason) for group in groups]


def incomplete_reason(task: CompleteTask, *, min_members: int | None) -> str:
    """Return why the task's groups cannot be used, or an empty string when they can."""
    if task.why == "run_finished":
        return "run_finished"
    if task.num_finished == task.group_size:
        return ""
    if min_members is not None and task.num_finished >= min_members:
        return ""
    return "expired" if task.why == "expired" else "incomplete"


def filter_reason(group: Group, *, rules: Rules) -> str:
    """Return `filtered` when a filter refuses the group, `filter_failed` when one raises or answers no bool, else an
    empty string.
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
            return "filtered"
    return ""


def _verdict(task: CompleteTask, group: Group, *, rules: Rules, reason: str) -> GroupVerdict:
    judged, items = False, _items(task.task_id, group).SerializeToString()
    if not reason and task.credited is not None and group.policy not in task.credited:
        reason = "no_credit"
    if not reason:
        reason = filter_reason(group, rules=rules)
        judged = reason in ("", "filtered")
    return GroupVerdict(
        group_id=group.group_id,
        policy_id=group.policy,
        verdict=reason or READY,
        judged=judged,
        oldest_version=group.oldest_version,
        reward_sum=sum(group.rewards),
        items=items,
        trajectory_ids=tuple(trajectory.trajectory_id for trajectory in group.trajectories),
    )


def _items(task_id: str, group: Group) -> batch_pb2.Batch:
    return batch_pb2.Batch(
        items=[
            batch_pb2.BatchItem(
                trajectory_id=trajectory.trajectory_id,
                group_id=group.group_id,
                task_id=task_id,
                num_tokens=trajectory.num_tokens,
                num_trainable_tokens=trajectory.num_trainable_tokens,
                reward=trajectory.reward,
                min_version=trajectory.min_version,
                max_version=trajectory.max_version,
                role=group.role,
                source=group.task.source,
            )
            for trajectory in group.trajectories
        ]
    )
