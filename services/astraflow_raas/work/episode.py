"""Turning what a workflow returned into the contract's `Episode`, or saying why it cannot be.

Invariant: an episode that leaves this module passes the server's validators: equal lengths, finite reward,
log-probs ≤ 0 exactly where the mask is set, spans that cover every trainable token, and for an evaluation one
exact version. Tokens are never re-encoded. Pure; called by `session`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from astraflow import plugins
from astraflow.client import MAX_MESSAGE_BYTES
from astraflow.columns import Columns, encode_columns
from astraflow.errors import RequestError
from astraflow.rollout.v1 import task_pb2, trajectory_pb2

MAX_TRAJECTORIES = 64
MAX_METRICS = 64
MAX_TOKENS = 1_048_576
# A push is one message; the rest is room for its frame.
MAX_EPISODE_BYTES = MAX_MESSAGE_BYTES - 2**20
_MAX_TOKEN_ID = 2**31 - 1


class EpisodeRefused(RequestError):
    """What the workflow returned cannot be trained on. `slug` names the rule, the message its values."""

    reason, code = "EPISODE_REFUSED", "INVALID_ARGUMENT"

    def __init__(self, slug: str, message: str) -> None:
        super().__init__(f"{slug}: {message}", metadata={"reason": slug})
        self.slug = slug


class VersionMoved(EpisodeRefused):
    """An evaluation episode holds tokens of another version than the one it must judge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeIds:
    """Who ran which member of what, under which id."""

    episode_id: str
    node_id: str
    member: int


def build_episode(
    episode: plugins.Episode, *, lease: task_pb2.Lease, ids: EpisodeIds
) -> trajectory_pb2.Episode:
    """Return the message for a finished episode. Raises EpisodeRefused, VersionMoved for evaluations."""
    if len(episode.trajectories) > MAX_TRAJECTORIES:
        raise EpisodeRefused(
            "too_many_trajectories",
            f"{len(episode.trajectories)} trajectories, the limit is {MAX_TRAJECTORIES} per episode",
        )
    message = trajectory_pb2.Episode(
        run_id=lease.run_id,
        task_id=lease.task.task_id,
        episode_id=ids.episode_id,
        member=ids.member,
        attempt=lease.attempt,
        node_id=ids.node_id,
        status=trajectory_pb2.EPISODE_STATUS_FINISHED,
    )
    for index, trajectory in enumerate(episode.trajectories):
        item = _item(trajectory, lease=lease, trajectory_id=f"{ids.episode_id}-{index}")
        message.trajectories.append(item)
    message.metrics.update(_metrics(episode))
    if message.ByteSize() > MAX_EPISODE_BYTES:
        raise EpisodeRefused(
            "too_large",
            f"{message.ByteSize()} bytes, the limit is {MAX_EPISODE_BYTES} per episode; return fewer or shorter "
            "trajectories",
        )
    return message


def _item(
    trajectory: plugins.Trajectory, *, lease: task_pb2.Lease, trajectory_id: str
) -> trajectory_pb2.TrajectoryItem:
    where = f"trajectory of policy {trajectory.policy!r}"
    sampling = lease.sampling.get(trajectory.policy)
    if sampling is None:
        raise EpisodeRefused("unknown_policy", f"{where}: the run's policies are {', '.join(lease.sampling)}")
    if not math.isfinite(trajectory.reward):
        raise EpisodeRefused(
            "reward_not_finite", f"{where}: reward {trajectory.reward!r}; a reward must be a finite number"
        )
    columns = _columns(trajectory, where=where)
    _check_logprobs(columns, where=where)
    versions = _trainable_versions(columns, where=where)
    _check_required(versions, lease.required_versions.get(trajectory.policy), where=where)
    body = encode_columns(columns, trajectory_id=trajectory_id)
    body.sampling.CopyFrom(sampling)
    header = trajectory_pb2.TrajectoryHeader(
        trajectory_id=trajectory_id,
        policy_id=trajectory.policy,
        role=trajectory.role,
        num_tokens=len(columns.token_ids),
        num_trainable_tokens=int(columns.loss_mask.sum()),
        min_version=min(versions),
        max_version=max(versions),
        reward=trajectory.reward,
        finish_reason=trajectory.finish_reason,
        metrics=_finite(trajectory.metrics),
    )
    return trajectory_pb2.TrajectoryItem(header=header, body=body.SerializeToString())


def _columns(trajectory: plugins.Trajectory, *, where: str) -> Columns:
    lengths = {name: len(getattr(trajectory, name)) for name in ("token_ids", "loss_mask", "logprobs")}
    num_tokens = lengths["token_ids"]
    if len(set(lengths.values())) != 1 or not 1 <= num_tokens <= MAX_TOKENS:
        raise EpisodeRefused(
            "length_mismatch", f"{where}: lengths {lengths}; expected equal ones in [1, {MAX_TOKENS}]"
        )
    columns = Columns(
        token_ids=_token_ids(trajectory.token_ids, where=where),
        loss_mask=np.fromiter(trajectory.loss_mask, dtype=bool, count=num_tokens),
        logprobs=np.asarray(trajectory.logprobs, dtype=np.float32),
        version_spans=tuple((span.start, span.end, span.version) for span in trajectory.version_spans),
    )
    if not columns.loss_mask.any():
        raise EpisodeRefused(
            "no_trainable_token", f"{where}: no bit of the loss mask is set; leave the trajectory out instead"
        )
    return columns


def _token_ids(token_ids: Sequence[int], *, where: str) -> NDArray[np.int32]:
    wide = np.asarray(token_ids, dtype=np.int64)
    lowest, highest = int(wide.min()), int(wide.max())
    if lowest < 0 or highest > _MAX_TOKEN_ID:
        raise EpisodeRefused(
            "token_out_of_range",
            f"{where}: token ids span [{lowest}, {highest}], expected [0, {_MAX_TOKEN_ID}]",
        )
    return wide.astype(np.int32)


def _check_logprobs(columns: Columns, *, where: str) -> None:
    inside, outside = columns.logprobs[columns.loss_mask], columns.logprobs[~columns.loss_mask]
    if not np.isfinite(inside).all() or inside.max() > 0.0:
        raise EpisodeRefused(
            "bad_logprob",
            f"{where}: a trainable token's log-prob is {_worst(inside)}, expected finite and ≤ 0",
        )
    if outside.any():
        raise EpisodeRefused(
            "logprob_outside_mask", f"{where}: log-probs must be 0 where the loss mask is not set"
        )


def _worst(logprobs: NDArray[np.float32]) -> float:
    broken = logprobs[~np.isfinite(logprobs)]
    return float(broken[0]) if broken.size else float(logprobs.max())


def _trainable_versions(columns: Columns, *, where: str) -> list[int]:
    """Versions of the spans that hold a trainable token; refuses spans that leave one out."""
    num_tokens, covered, versions, last_end = len(columns.loss_mask), 0, [], 0
    for start, end, version in columns.version_spans:
        if not last_end <= start < end <= num_tokens or version < 0:
            raise EpisodeRefused(
                "bad_spans",
                f"{where}: span [{start}, {end}) of version {version}, {num_tokens} tokens, after {last_end}",
            )
        trainable = int(np.count_nonzero(columns.loss_mask[start:end]))
        covered, last_end = covered + trainable, end
        if trainable:
            versions.append(version)
    total = int(np.count_nonzero(columns.loss_mask))
    if covered != total:
        raise EpisodeRefused(
            "bad_spans", f"{where}: version spans cover {covered} of {total} trainable tokens"
        )
    return versions


def _check_required(versions: Sequence[int], required: int | None, *, where: str) -> None:
    if required is not None and set(versions) != {required}:
        raise VersionMoved(
            "version_unavailable",
            f"{where}: sampled under versions {sorted(set(versions))}, required {required}",
        )


def _metrics(episode: plugins.Episode) -> Mapping[str, float]:
    """The episode's metrics, and each trajectory's under `<policy>.<name>`; a metric is for people, so a bad
    one is left out."""
    named = dict(episode.metrics)
    for trajectory in episode.trajectories:
        named.update({f"{trajectory.policy}.{name}": value for name, value in trajectory.metrics.items()})
    return _finite(named)


def _finite(metrics: Mapping[str, float]) -> Mapping[str, float]:
    finite = {str(name): float(value) for name, value in metrics.items() if math.isfinite(value)}
    return dict(list(finite.items())[:MAX_METRICS])
