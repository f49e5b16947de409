"""Turning what a workflow returned into the contract's `Episode`, or saying why it cannot be.

Invariant: an episode that leaves this module passes the server's checks, which are those of `astraflow.trajectories`,
holds trajectories of trained roles only, and for an evaluation one exact version. Tokens are never re-encoded. Pure;
called by `session`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from astraflow import plugins
from astraflow.client import MAX_MESSAGE_BYTES
from astraflow.columns import Columns, encode_columns
from astraflow.recipe import ResolvedRole, RowLimits
from astraflow.rollout.v1 import blob_pb2, task_pb2, trajectory_pb2
from astraflow.trajectories import (
    MAX_METRICS,
    MAX_TRAJECTORIES,
    BadTrajectory,
    Trained,
    check_columns,
    check_reward,
    check_row,
    check_trainable,
    check_turns,
)
from astraflow_raas.work.lease import is_evaluation

# A push is one message; the rest is room for its frame.
MAX_EPISODE_BYTES = MAX_MESSAGE_BYTES - 2**20


class VersionMoved(BadTrajectory):
    """An evaluation episode holds tokens of another version than the one it must judge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeIds:
    """Who ran which member of what, under which id."""

    episode_id: str
    node_id: str
    member: int


def build_episode(
    episode: plugins.Episode,
    *,
    lease: task_pb2.Lease,
    ids: EpisodeIds,
    roles: Mapping[str, ResolvedRole],
    row_limits: Mapping[str, RowLimits],
    experts: Sequence[blob_pb2.BlobRef | None] = (),
) -> trajectory_pb2.Episode:
    """Return the message for a finished episode; `roles` are by the names that its workflow uses, `experts` what each
    of its trajectories refers to, where any does.

    Raises BadTrajectory, VersionMoved for evaluations.
    """
    if len(episode.trajectories) > MAX_TRAJECTORIES:
        raise BadTrajectory(
            "too_many_trajectories",
            f"{len(episode.trajectories)} trajectories, the limit is {MAX_TRAJECTORIES} per episode",
        )
    message = trajectory_pb2.Episode(
        run_id=lease.run_id,
        task_id=lease.task.task_id,
        episode_id=ids.episode_id,
        member=ids.member,
        attempt=lease.attempt,
        hedge=lease.hedge,
        lease_id=lease.lease_id,
        node_id=ids.node_id,
        status=trajectory_pb2.EPISODE_STATUS_FINISHED,
    )
    played = [(_role_of(trajectory, roles), trajectory) for trajectory in episode.trajectories]
    for index, (role, trajectory) in enumerate(played):
        if role.is_trained:
            name, limits = f"{ids.episode_id}-{index}", row_limits[role.policy_id]
            routing = experts[index] if experts else None
            item = _item(
                trajectory, role=role, lease=lease, trajectory_id=name, limits=limits, routing=routing
            )
            message.trajectories.append(item)
    most = min(limits.max_abs_reward for limits in row_limits.values())
    message.metrics.update(_metrics(episode, played, most=most))
    if message.ByteSize() > MAX_EPISODE_BYTES:
        raise BadTrajectory(
            "too_large",
            f"{message.ByteSize()} bytes, the limit is {MAX_EPISODE_BYTES} per episode; return fewer or shorter "
            "trajectories",
        )
    return message


def _role_of(trajectory: plugins.Trajectory, roles: Mapping[str, ResolvedRole]) -> ResolvedRole:
    """The role that a trajectory is of: the one it names, or the only one of its policy. Raises BadTrajectory."""
    where = f"trajectory of policy {trajectory.policy!r}"
    own = {name: role for name, role in roles.items() if role.policy_id == trajectory.policy}
    if not own:
        known = dict.fromkeys(role.policy_id for role in roles.values())
        raise BadTrajectory("unknown_policy", f"{where}: the run's policies are {', '.join(known)}")
    for name, role in own.items():
        if trajectory.role in (name, role.name):
            return role
    if trajectory.role or (len(own) > 1 and trajectory.policy not in own):
        raise BadTrajectory(
            "unknown_role",
            f"{where}: role {trajectory.role!r}, it plays {', '.join(own)}; give the role of the handle that sampled",
        )
    return own.get(trajectory.policy) or next(iter(own.values()))


def _item(
    trajectory: plugins.Trajectory,
    *,
    role: ResolvedRole,
    lease: task_pb2.Lease,
    trajectory_id: str,
    limits: RowLimits,
    routing: blob_pb2.BlobRef | None,
) -> trajectory_pb2.TrajectoryItem:
    where = f"trajectory of role {role.name!r}"
    sampling = lease.sampling[role.policy_id]
    most = limits.max_abs_reward
    check_reward(where, trajectory.reward, max_abs_reward=most)
    columns, trained = _columns(trajectory, where=where)
    _check_required(trained, lease.required_versions.get(trajectory.policy), where=where)
    if not is_evaluation(lease):
        first_token_trained = bool(columns.loss_mask[0])
        check_trainable(where, first_token_trained=first_token_trained, temperature=sampling.temperature)
        check_row(where, columns.token_ids, limits)
    body = encode_columns(columns, trajectory_id=trajectory_id)
    for sent, sampled in zip(body.version_spans, trajectory.version_spans, strict=True):
        sent.recomputed = sampled.recomputed
    body.sampling.CopyFrom(sampling)
    if routing is not None:
        body.expert_routing.CopyFrom(routing)
    check_turns(where, trajectory.turn_spans, num_tokens=len(columns.token_ids), max_abs_reward=most)
    for span in trajectory.turn_spans:
        body.turn_spans.add(start=span.start, end=span.end, role=span.role, reward=span.reward)
    header = trajectory_pb2.TrajectoryHeader(
        trajectory_id=trajectory_id,
        policy_id=trajectory.policy,
        role=role.name,
        num_tokens=len(columns.token_ids),
        num_trainable_tokens=trained.num_tokens,
        min_version=trained.min_version,
        max_version=trained.max_version,
        reward=trajectory.reward,
        finish_reason=trajectory.finish_reason,
        metrics=_bounded(trajectory.metrics, most=most),
    )
    return trajectory_pb2.TrajectoryItem(header=header, body=body.SerializeToString())


def _columns(trajectory: plugins.Trajectory, *, where: str) -> tuple[Columns, Trained]:
    """The columns as arrays, and what is trainable of them. Raises BadTrajectory."""
    token_ids = np.asarray(trajectory.token_ids, dtype=np.int64)
    loss_mask = np.fromiter(trajectory.loss_mask, dtype=bool)
    logprobs = np.asarray(trajectory.logprobs, dtype=np.float32)
    trained = check_columns(
        where,
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        version_spans=trajectory.version_spans,
    )
    spans = tuple((span.start, span.end, span.version) for span in trajectory.version_spans)
    return Columns(token_ids.astype(np.int32), loss_mask, logprobs, spans), trained


def _check_required(trained: Trained, required: int | None, *, where: str) -> None:
    if required is not None and not trained.min_version == trained.max_version == required:
        raise VersionMoved(
            "wrong_version",
            f"{where}: sampled under versions {trained.min_version}–{trained.max_version}, required {required}",
        )


def _metrics(
    episode: plugins.Episode, played: Sequence[tuple[ResolvedRole, plugins.Trajectory]], *, most: float
) -> Mapping[str, float]:
    """The episode's metrics, and each trajectory's under `<role>.<name>`; a metric is for people, so a bad
    one is left out."""
    named = dict(episode.metrics)
    for role, trajectory in played:
        named.update({f"{role.name}.{name}": value for name, value in trajectory.metrics.items()})
    return _bounded(named, most=most)


def _bounded(metrics: Mapping[str, float], *, most: float) -> Mapping[str, float]:
    bounded = {str(name): float(value) for name, value in metrics.items() if abs(value) <= most}
    return dict(list(bounded.items())[:MAX_METRICS])
