"""The wall in front of training: every pushed episode is checked before it may be counted as good.

Pure. What a trajectory must be is written in `astraflow.trajectories`; here is what only the server can tell: whether
ids, versions, policies and side data belong to the run. The first problem is raised as `BadTrajectory`. Called by
ingest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from astraflow._contract.bounds import judge
from astraflow.blobs import blob_problem
from astraflow.recipe import RowLimits
from astraflow.recipe.dataflow import DEFAULT_MAX_ABS_REWARD
from astraflow.rollout.v1 import trajectory_pb2
from astraflow.trajectories import (
    BadTrajectory,
    check_body,
    check_metrics,
    check_reward,
    check_row,
    check_spans,
    check_trainable,
)

LOST_VERSIONS = 16
"""How many announced versions a Redis that lost its last seconds may have forgotten; versions further
ahead cannot exist.
"""


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What the server knows: the newest announced version of each policy of the run (-1 before the first),
    and what an evaluation demands.
    """

    newest_versions: Mapping[str, int]
    roles: Mapping[str, str]
    """The policy of each trained role."""
    row_limits: Mapping[str, RowLimits] = field(default_factory=dict)
    """What the trainer of each policy can train on."""
    demand: Mapping[str, int] = field(default_factory=dict)
    """The version of each policy that an evaluation demands; empty for training."""
    max_abs_reward: float = DEFAULT_MAX_ABS_REWARD
    """Largest reward or metric."""
    blob_prefix: str = ""
    """Where the run's blobs lie; nothing else may be referred to."""


def unknown_version(episode: trajectory_pb2.Episode, *, newest_versions: Mapping[str, int]) -> str | None:
    """Return a sentence when the episode names a version that may merely not be known here yet; the push
    is then repeated later.
    """
    for item in episode.trajectories:
        header = item.header
        newest = newest_versions.get(header.policy_id)
        if newest is not None and newest < header.max_version <= newest + LOST_VERSIONS:
            return (
                f"trajectory {header.trajectory_id} was sampled under version {header.max_version} of "
                f"{header.policy_id}, "
                f"the newest announced here is {newest}; push it again once the trainer has announced it"
            )
    return None


def check_episode(episode: trajectory_pb2.Episode, expectation: Expectation) -> None:
    """Raise BadTrajectory for the first problem of an episode; its headers get the digests of their responses."""
    _check_frame(episode)
    check_metrics("the episode", episode.metrics, max_abs_reward=expectation.max_abs_reward)
    for item in episode.trajectories:
        _check_item(item, expectation=expectation)


def _check_frame(episode: trajectory_pb2.Episode) -> None:
    items = episode.trajectories
    if problem := judge(episode):
        raise BadTrajectory(*problem)
    if episode.status == trajectory_pb2.EPISODE_STATUS_FAILED and items:
        raise BadTrajectory(
            "failed_with_trajectories", f"a failed episode carries {len(items)} trajectories; send none"
        )
    if len({item.header.trajectory_id for item in items}) != len(items):
        raise BadTrajectory(
            "duplicate_id", "two trajectories of the episode have one trajectory_id; ids are unique in a run"
        )


def _check_item(item: trajectory_pb2.TrajectoryItem, *, expectation: Expectation) -> None:
    header, body = item.header, item.body
    _check_header(header, expectation=expectation)
    # The digest is the only use of the body that filters have; what the client wrote there is replaced.
    most = expectation.max_abs_reward
    trajectory, header.response_digest = check_body(body, header, max_abs_reward=most)
    if problem := judge(trajectory, otherwise="out_of_bounds"):
        raise BadTrajectory(problem[0], f"{header.trajectory_id}: {problem[1]}")
    if not expectation.demand:
        check_trainable(
            header.trajectory_id,
            first_token_trained=bool(trajectory.loss_mask[0] & 1),
            temperature=trajectory.sampling.temperature,
        )
        if limits := expectation.row_limits.get(header.policy_id):
            check_row(header.trajectory_id, np.frombuffer(trajectory.token_ids, dtype="<i4"), limits)
    _check_blobs(trajectory, header, prefix=expectation.blob_prefix)


def _check_header(header: trajectory_pb2.TrajectoryHeader, *, expectation: Expectation) -> None:
    name, newest = header.trajectory_id, expectation.newest_versions.get(header.policy_id)
    if newest is None:
        known = ", ".join(sorted(expectation.newest_versions))
        raise BadTrajectory(
            "unknown_policy", f"{name}: policy {header.policy_id!r} is not one of this run's ({known})"
        )
    role = header.role or header.policy_id
    if expectation.roles.get(role) != header.policy_id:
        trained = ", ".join(f"{name} of {policy}" for name, policy in expectation.roles.items())
        raise BadTrajectory(
            "unknown_role",
            f"{name}: role {role!r} of policy {header.policy_id!r} is none of those trained ({trained}); leave it out",
        )
    if header.max_version > newest:
        raise BadTrajectory(
            "future_version",
            f"{name}: version {header.max_version} of {header.policy_id}, the newest announced is {newest}",
        )
    check_reward(name, header.reward, max_abs_reward=expectation.max_abs_reward)
    check_metrics(name, header.metrics, max_abs_reward=expectation.max_abs_reward)
    _check_demand(header, demand=expectation.demand)


def _check_demand(header: trajectory_pb2.TrajectoryHeader, *, demand: Mapping[str, int]) -> None:
    wanted = demand.get(header.policy_id)
    if wanted is not None and not header.min_version == header.max_version == wanted:
        raise BadTrajectory(
            "wrong_version",
            f"{header.trajectory_id}: evaluation demands version {wanted} of {header.policy_id} throughout, "
            f"got {header.min_version}–{header.max_version}; fail such a lease with version_unavailable",
        )


def _check_blobs(
    trajectory: trajectory_pb2.Trajectory, header: trajectory_pb2.TrajectoryHeader, *, prefix: str
) -> None:
    name, media = header.trajectory_id, trajectory.media
    check_spans(name, media, num_tokens=header.num_tokens, what="media")
    refs = [span.blob for span in media]
    if trajectory.HasField("expert_routing"):
        refs.append(trajectory.expert_routing)
    wrong = next(filter(None, (blob_problem(ref, prefix=prefix) for ref in refs)), None)
    if wrong:
        raise BadTrajectory("bad_blob", f"{name}: {wrong}")
