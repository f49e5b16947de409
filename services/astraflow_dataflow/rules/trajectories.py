"""The wall in front of training: every pushed trajectory is checked column by column before it may be counted as good.

Pure. Columns are read through numpy views, never copied or re-encoded. The first problem found is returned
with a stable reason slug and a sentence that says value, limit and remedy; `None` means good. Called by
ingest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from google.protobuf.message import DecodeError

from astraflow.blobs import blob_problem
from astraflow.columns import decode_logprobs, unpack_mask
from astraflow.rollout.v1 import trajectory_pb2
from astraflow_dataflow.rules.evaluation import Demand

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_TOKENS = 1_048_576
MAX_BODY_BYTES = 32 * 2**20
MAX_TRAJECTORIES = 64
MAX_METRICS = 64
MAX_MEDIA = 256
LOST_VERSIONS = 16
"""How many announced versions a Redis that lost its last seconds may have forgotten; versions further
ahead cannot exist.
"""

_ID = re.compile(r"[!-~]{1,128}")
_ROLE = re.compile(r"[!-~]{0,64}")
_FINISHED = trajectory_pb2.EPISODE_STATUS_FINISHED
_FAILED = trajectory_pb2.EPISODE_STATUS_FAILED


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Why an episode is refused: a stable slug, and a sentence for people."""

    reason: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What the server knows: the newest announced version of each policy of the run (-1 before the first),
    and what an evaluation demands.
    """

    newest_versions: Mapping[str, int]
    demand: Demand | None = None
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


def check_episode(episode: trajectory_pb2.Episode, expectation: Expectation) -> Problem | None:
    """Return the first problem of an episode, or None."""
    return _check_frame(episode) or _first(
        _check_item(item, expectation=expectation) for item in episode.trajectories
    )


def _check_frame(episode: trajectory_pb2.Episode) -> Problem | None:
    items = episode.trajectories
    if not _ID.fullmatch(episode.episode_id):
        return _problem(
            "bad_id", f"episode_id {episode.episode_id!r} must be 1–128 printable characters without spaces"
        )
    if episode.status not in (_FINISHED, _FAILED):
        return _problem("bad_status", f"status {episode.status} is neither FINISHED nor FAILED")
    if episode.status == _FAILED and items:
        return _problem(
            "failed_with_trajectories", f"a failed episode carries {len(items)} trajectories; send none"
        )
    if len(items) > MAX_TRAJECTORIES:
        return _problem(
            "too_many_trajectories",
            f"{len(items)} trajectories, at most {MAX_TRAJECTORIES}; split the episode's roles",
        )
    if len({item.header.trajectory_id for item in items}) != len(items):
        return _problem(
            "duplicate_id", "two trajectories of the episode have one trajectory_id; ids are unique in a run"
        )
    for metrics in (episode.metrics, *(item.header.metrics for item in items)):
        if len(metrics) > MAX_METRICS or not all(map(math.isfinite, metrics.values())):
            return _problem(
                "bad_metrics", f"at most {MAX_METRICS} metrics, all finite; got {dict(metrics)}"[:500]
            )
    return None


def _check_item(item: trajectory_pb2.TrajectoryItem, *, expectation: Expectation) -> Problem | None:
    header, body = item.header, item.body
    problem = _check_header(header, size_bytes=len(body), expectation=expectation)
    if problem:
        return problem
    try:
        trajectory = trajectory_pb2.Trajectory.FromString(body)
    except DecodeError:
        return _problem(
            "bad_body",
            f"the body of {header.trajectory_id} ({len(body)} bytes) is not a serialized Trajectory",
        )
    return (
        check_trajectory(trajectory, header)
        or (_check_trainable(trajectory) if expectation.demand is None else None)
        or _check_blobs(
            trajectory,
            name=header.trajectory_id,
            num_tokens=header.num_tokens,
            prefix=expectation.blob_prefix,
        )
    )


def _check_header(
    header: trajectory_pb2.TrajectoryHeader, *, size_bytes: int, expectation: Expectation
) -> Problem | None:
    name, newest = header.trajectory_id, expectation.newest_versions.get(header.policy_id)
    if not _ID.fullmatch(name):
        return _problem("bad_id", f"trajectory_id {name!r} must be 1–128 printable characters without spaces")
    if not _ROLE.fullmatch(header.role):
        return _problem(
            "bad_role", f"role {header.role!r} must be at most 64 printable characters without spaces"
        )
    if newest is None:
        known = ", ".join(sorted(expectation.newest_versions))
        return _problem(
            "unknown_policy", f"{name}: policy {header.policy_id!r} is not one of this run's ({known})"
        )
    if size_bytes > MAX_BODY_BYTES:
        return _problem(
            "too_large", f"{name}: body of {size_bytes} bytes, at most {MAX_BODY_BYTES}; shorten the episode"
        )
    if not math.isfinite(header.reward):
        return _problem(
            "nan_reward",
            f"{name}: reward {header.reward} is not finite; let the reward plug-in fail the episode instead",
        )
    if header.max_version > newest:
        return _problem(
            "future_version",
            f"{name}: version {header.max_version} of {header.policy_id}, the newest announced is {newest}",
        )
    return _check_demand(header, demand=expectation.demand)


def _check_demand(header: trajectory_pb2.TrajectoryHeader, *, demand: Demand | None) -> Problem | None:
    if demand is None or header.policy_id != demand.policy_id:
        return None
    if header.min_version == header.max_version == demand.version:
        return None
    return _problem(
        "wrong_version",
        f"{header.trajectory_id}: evaluation demands version {demand.version} of {demand.policy_id} throughout, "
        f"got {header.min_version}–{header.max_version}; fail such a lease with version_unavailable",
    )


def check_trajectory(
    trajectory: trajectory_pb2.Trajectory, header: trajectory_pb2.TrajectoryHeader
) -> Problem | None:
    """Return the first problem of a decoded body against its header, or None. O(T) through views."""
    name, token_bytes, mask_bytes = header.trajectory_id, trajectory.token_ids, trajectory.loss_mask
    if trajectory.trajectory_id != name:
        return _problem(
            "id_mismatch", f"the body says trajectory_id {trajectory.trajectory_id!r}, its header {name!r}"
        )
    num_tokens = len(token_bytes) // 4
    problem = _check_lengths(trajectory, name=name, header_tokens=header.num_tokens)
    if problem:
        return problem
    mask_T = unpack_mask(mask_bytes, num_tokens)
    return (
        _check_token_ids(np.frombuffer(token_bytes, dtype="<i4"), name=name)
        or _check_mask(mask_T, mask_bytes, header=header)
        or _check_logprobs(decode_logprobs(trajectory), mask_T, name=name)
        or _check_version_spans(trajectory.version_spans, mask_T, header=header)
        or _check_turn_spans(trajectory.turn_spans, num_tokens=num_tokens, name=name)
    )


def _check_trainable(trajectory: trajectory_pb2.Trajectory) -> Problem | None:
    """What only training asks for: one trajectory without it would stop every trainer that is given its batch."""
    name, temperature = trajectory.trajectory_id, trajectory.sampling.temperature
    if not 0 < temperature < math.inf:
        return _problem(
            "bad_temperature",
            f"{name}: sampling.temperature is {temperature}; the log-probs of training refer to one above 0: sample "
            "training tasks at a temperature above 0 and send it",
        )
    if trajectory.loss_mask[0] & 1:
        return _problem(
            "first_token_trained",
            f"{name}: token 0 is in the loss mask, but nothing predicts it; begin with a prompt, or clear its bit",
        )
    return None


def _check_lengths(trajectory: trajectory_pb2.Trajectory, *, name: str, header_tokens: int) -> Problem | None:
    width = 2 if trajectory.logprob_dtype == trajectory_pb2.LOGPROB_DTYPE_BF16 else 4
    num_tokens, rest = divmod(len(trajectory.token_ids), 4)
    if rest:
        return _problem(
            "length_mismatch",
            f"{name}: token_ids holds {len(trajectory.token_ids)} bytes, not a multiple of 4",
        )
    if num_tokens == 0:
        return _problem("empty", f"{name}: no tokens; an episode without a trajectory sends none")
    if num_tokens > MAX_TOKENS:
        return _problem("too_long", f"{name}: {num_tokens} tokens, at most {MAX_TOKENS}")
    if num_tokens != header_tokens:
        return _problem("length_mismatch", f"{name}: {num_tokens} tokens, the header says {header_tokens}")
    if len(trajectory.logprobs) != width * num_tokens:
        return _problem(
            "length_mismatch",
            f"{name}: logprobs holds {len(trajectory.logprobs)} bytes, {num_tokens} tokens of {width} "
            f"bytes need {width * num_tokens}",
        )
    mask_bytes = (num_tokens + 7) // 8
    if len(trajectory.loss_mask) != mask_bytes:
        return _problem(
            "length_mismatch",
            f"{name}: loss_mask holds {len(trajectory.loss_mask)} bytes, {num_tokens} tokens need {mask_bytes}",
        )
    return None


def _check_token_ids(token_ids_T: NDArray[np.int32], *, name: str) -> Problem | None:
    smallest = int(token_ids_T.min())
    if smallest < 0:
        return _problem("token_out_of_range", f"{name}: token id {smallest}; ids are in [0, 2^31)")
    return None


def _check_mask(
    mask_T: NDArray[np.bool_], packed: bytes, *, header: trajectory_pb2.TrajectoryHeader
) -> Problem | None:
    trainable, used_bits = int(np.count_nonzero(mask_T)), len(mask_T) & 7
    if used_bits and packed[-1] >> used_bits:
        return _problem(
            "mask_padding",
            f"{header.trajectory_id}: padding bits after token {len(mask_T) - 1} are set; clear them",
        )
    if trainable != header.num_trainable_tokens:
        return _problem(
            "mask_mismatch",
            f"{header.trajectory_id}: {trainable} mask bits are set, the header says {header.num_trainable_tokens}",
        )
    if trainable == 0:
        return _problem(
            "no_trainable_tokens",
            f"{header.trajectory_id}: no token is trainable; leave such a trajectory out",
        )
    return None


def _check_logprobs(
    logprobs_T: NDArray[np.float32], mask_T: NDArray[np.bool_], *, name: str
) -> Problem | None:
    # One pass each for the largest and the smallest value: NaN wins both, infinities win one.
    largest, smallest = float(logprobs_T.max()), float(logprobs_T.min())
    if math.isnan(largest):
        return _problem(
            "nan_logprob", f"{name}: log-prob of token {int(np.isnan(logprobs_T).argmax())} is NaN"
        )
    if math.isinf(largest) or math.isinf(smallest):
        return _problem("inf_logprob", f"{name}: log-probs span {smallest} to {largest}; they must be finite")
    if largest > 0:
        return _problem(
            "positive_logprob", f"{name}: log-prob {largest} of token {int(logprobs_T.argmax())} is above 0"
        )
    if np.count_nonzero(logprobs_T) != np.count_nonzero(logprobs_T[mask_T]):
        return _problem(
            "logprob_outside_mask", f"{name}: a token outside the loss mask has a log-prob; write 0 there"
        )
    return None


def _check_version_spans(
    spans: Sequence[trajectory_pb2.VersionSpan],
    mask_T: NDArray[np.bool_],
    *,
    header: trajectory_pb2.TrajectoryHeader,
) -> Problem | None:
    name, end, covered, versions = header.trajectory_id, 0, 0, []
    for span in spans:
        if not end <= span.start < span.end <= len(mask_T):
            return _problem(
                "bad_spans",
                f"{name}: version span [{span.start}, {span.end}) is not ascending and disjoint within "
                f"{len(mask_T)} tokens",
            )
        end = span.end
        trainable = int(np.count_nonzero(mask_T[span.start : span.end]))
        covered += trainable
        if trainable:
            versions.append(span.version)
    if covered != header.num_trainable_tokens:
        return _problem(
            "spans_not_covering",
            f"{name}: version spans cover {covered} of {header.num_trainable_tokens} trainable tokens",
        )
    if min(versions) != header.min_version or max(versions) != header.max_version:
        return _problem(
            "version_mismatch",
            f"{name}: trainable spans hold versions {min(versions)}–{max(versions)}, the header says "
            f"{header.min_version}–{header.max_version}",
        )
    return None


def _check_turn_spans(
    spans: Sequence[trajectory_pb2.TurnSpan], *, num_tokens: int, name: str
) -> Problem | None:
    end = 0
    for span in spans:
        if not end <= span.start < span.end <= num_tokens:
            return _problem(
                "bad_spans",
                f"{name}: turn span [{span.start}, {span.end}) is not ascending and disjoint within "
                f"{num_tokens} tokens",
            )
        end = span.end
    return None


def _check_blobs(
    trajectory: trajectory_pb2.Trajectory, *, name: str, num_tokens: int, prefix: str
) -> Problem | None:
    if len(trajectory.media) > MAX_MEDIA:
        return _problem("too_many_media", f"{name}: {len(trajectory.media)} media, at most {MAX_MEDIA}")
    end = 0
    for span in trajectory.media:
        if not end <= span.start < span.end <= num_tokens:
            return _problem(
                "bad_spans",
                f"{name}: media span [{span.start}, {span.end}) is not ascending and disjoint within "
                f"{num_tokens} tokens",
            )
        end = span.end
    refs = [span.blob for span in trajectory.media]
    if trajectory.HasField("expert_routing"):
        refs.append(trajectory.expert_routing)
    wrong = next(filter(None, (blob_problem(ref, prefix=prefix) for ref in refs)), None)
    return _problem("bad_blob", f"{name}: {wrong}") if wrong else None


def _first(problems: Iterable[Problem | None]) -> Problem | None:
    return next((problem for problem in problems if problem), None)


def _problem(reason: str, detail: str) -> Problem:
    return Problem(reason=reason, detail=detail)
