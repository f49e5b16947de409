"""Groups: what a complete task's trajectories become.

A group is all trajectories of one task for one (policy, role). Pure: filters are passed in. Either a whole
group becomes ready or all of it is dropped for one reason. Called by `settling` with what the store returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from astraflow.dataflow.v1 import batch_pb2
from astraflow.plugins import Filter
from astraflow.rollout.v1 import trajectory_pb2
from astraflow_dataflow.records import CompleteTask, GroupVerdict
from astraflow_kit.log import get_logger

log = get_logger(__name__)

READY = "ready"


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the recipe says about complete tasks. `filters` are (name, plug-in) in order."""

    min_members: int | None
    filters: tuple[tuple[str, Filter], ...]


def group_id(task_id: str, *, policy_id: str, role: str) -> str:
    """Return the id of the group of one (policy, role) of a task."""
    return f"{task_id}/{policy_id}/{role}" if role else f"{task_id}/{policy_id}"


def judge(task: CompleteTask, rules: Rules) -> list[GroupVerdict]:
    """Return one verdict per group of a complete task, in a fixed order."""
    reason = incomplete_reason(task, min_members=rules.min_members)
    grouped: dict[tuple[str, str], list[trajectory_pb2.TrajectoryHeader]] = {}
    for trajectory_id in sorted(task.headers):
        header = trajectory_pb2.TrajectoryHeader.FromString(task.headers[trajectory_id])
        grouped.setdefault((header.policy_id, header.role), []).append(header)
    return [_verdict(task, headers, rules=rules, reason=reason) for _, headers in sorted(grouped.items())]


def incomplete_reason(task: CompleteTask, *, min_members: int | None) -> str:
    """Return why the task's groups cannot be used, or an empty string when they can."""
    if task.why == "run_finished":
        return "run_finished"
    if task.num_finished == task.group_size:
        return ""
    if min_members is not None and task.num_finished >= min_members:
        return ""
    return "expired" if task.why == "expired" else "incomplete"


def _verdict(
    task: CompleteTask, headers: Sequence[trajectory_pb2.TrajectoryHeader], *, rules: Rules, reason: str
) -> GroupVerdict:
    policy_id, role = headers[0].policy_id, headers[0].role
    gid = group_id(task.task_id, policy_id=policy_id, role=role)
    judged = False
    if not reason and task.credited is not None and policy_id not in task.credited:
        reason = "no_credit"
    if not reason:
        reason = filter_reason(gid, [header.reward for header in headers], rules=rules)
        judged = reason in ("", "filtered")
    return GroupVerdict(
        group_id=gid,
        policy_id=policy_id,
        verdict=reason or READY,
        judged=judged,
        oldest_version=min(header.min_version for header in headers),
        reward_sum=sum(header.reward for header in headers),
        items=_items(task.task_id, gid, headers).SerializeToString(),
        trajectory_ids=tuple(header.trajectory_id for header in headers),
    )


def filter_reason(gid: str, rewards: Sequence[float], *, rules: Rules) -> str:
    """Return `filtered` when a filter refuses the rewards, `filter_failed` when one raises, else an empty string."""
    for name, keep in rules.filters:
        try:
            kept = keep(rewards)
        except Exception:  # a plug-in must not stop the run; the group is dropped under its own reason
            log.exception("filter.failed", filter=name, group_id=gid)
            return "filter_failed"
        if not kept:
            return "filtered"
    return ""


def _items(task_id: str, gid: str, headers: Sequence[trajectory_pb2.TrajectoryHeader]) -> batch_pb2.Batch:
    return batch_pb2.Batch(
        items=[
            batch_pb2.BatchItem(
                trajectory_id=header.trajectory_id,
                group_id=gid,
                task_id=task_id,
                num_tokens=header.num_tokens,
                num_trainable_tokens=header.num_trainable_tokens,
                reward=header.reward,
                min_version=header.min_version,
                max_version=header.max_version,
                role=header.role,
            )
            for header in headers
        ]
    )
