"""What a trajectory must be to be trained on: one set of rules for nodes, the server and trainers.

A node checks before it pushes, the server before it counts, a trainer before it packs; all three call these functions,
so what one lets pass the next does not refuse. Columns are read, never copied. The first rule that is broken is
raised as `BadTrajectory` with its slug from `REASONS` and a sentence that says value, limit and remedy.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from google.protobuf.message import DecodeError

from astraflow._contract.rpcs import bounds_of
from astraflow.columns import as_logprobs, unpack_mask
from astraflow.errors import InvalidTrajectoryError
from astraflow.rollout.v1 import trajectory_pb2

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from astraflow.recipe import RowLimits

__all__ = [
    "MAX_METRICS",
    "MAX_TOKENS",
    "MAX_TRAJECTORIES",
    "REASONS",
    "BadTrajectory",
    "Described",
    "Trained",
    "batch_digest",
    "check_body",
    "check_columns",
    "check_metrics",
    "check_reward",
    "check_row",
    "check_spans",
    "check_trainable",
    "check_turns",
]

MAX_TOKENS = bounds_of(trajectory_pb2.Trajectory, "token_ids").max_bytes // 4
"""Of one trajectory."""
MAX_TRAJECTORIES = bounds_of(trajectory_pb2.Episode, "trajectories").max_items
"""Of one episode."""
MAX_METRICS = bounds_of(trajectory_pb2.Episode, "metrics").max_items
"""Of one episode."""
_MAX_TOKEN_ID = 2**31 - 1
_INT32 = np.dtype("<i4")

REASONS: Mapping[str, str] = {
    "bad_blob": "a reference to side data names another run or store, or is not whole",
    "bad_body": "the body is not a serialized Trajectory",
    "bad_dtype": "the log-probs have an unknown element type",
    "bad_id": "an id is not 1–128 printable characters without spaces",
    "bad_metrics": "more than 64 metrics, or one that is not finite",
    "bad_role": "the role is not at most 64 printable characters without spaces",
    "bad_spans": "spans overlap, descend, or leave the tokens",
    "bad_status": "the episode is neither finished nor failed",
    "bad_temperature": "training tasks are sampled at a finite temperature above 0",
    "duplicate_id": "a trajectory id is used twice",
    "empty": "no tokens",
    "failed_with_trajectories": "a failed episode carries trajectories",
    "first_token_trained": "token 0 is in the loss mask; nothing predicts it",
    "future_version": "the version cannot have been announced",
    "id_mismatch": "body and header name different trajectories",
    "inf_logprob": "a log-prob is infinite",
    "length_mismatch": "columns, or body and header, have different lengths",
    "logprob_outside_mask": "a token outside the loss mask has a log-prob",
    "mask_mismatch": "body and header count different trainable tokens",
    "mask_padding": "bits after the last token are set",
    "nan_logprob": "a log-prob is NaN",
    "nan_reward": "the reward is not finite",
    "no_trainable_tokens": "no token is in the loss mask",
    "out_of_bounds": "another field of the body is outside its bounds",
    "positive_logprob": "a log-prob is above 0",
    "reward_range": "a reward or a metric is beyond ±`dataflow.max_abs_reward`",
    "spans_not_covering": "a trainable token has no version",
    "token_out_of_range": "a token id is not in [0, 2^31)",
    "token_unknown": "a token id is outside the vocabulary of the policy's model",
    "too_large": "the message is larger than one push may be",
    "too_long": "more than 1,048,576 tokens",
    "too_long_to_train": "more tokens than `trainer.tokens_per_microbatch`",
    "too_many_draws": "more than 64 draws of snapshot policies in an episode",
    "too_many_media": "more than 256 media",
    "too_many_trajectories": "more than 64 trajectories in an episode",
    "unknown_policy": "the run has no such policy",
    "unknown_role": "the policy is not trained in such a role",
    "version_mismatch": "body and header name different versions",
    "wrong_version": "an evaluation holds tokens of another version than it demands",
}
"""Every rule by its slug. Slugs are stable: they are kept with refused episodes, counted and logged."""


class BadTrajectory(InvalidTrajectoryError):
    """A rule is broken: `slug` names it, `detail` says with which values."""

    def __init__(self, slug: str, detail: str) -> None:
        super().__init__(f"{slug}: {detail}", metadata={"reason": slug})
        self.slug, self.detail = slug, detail


class Span(Protocol):
    """Tokens [start, end)."""

    @property
    def start(self) -> int:
        """First token."""

    @property
    def end(self) -> int:
        """One after the last token."""


class Turn(Span, Protocol):
    """Tokens of one turn."""

    @property
    def reward(self) -> float:
        """What the environment gave for it."""


class VersionedSpan(Span, Protocol):
    """Tokens [start, end) that were sampled under weight `version`."""

    @property
    def version(self) -> int:
        """Weight version, at least 0."""


class Described(Protocol):
    """What a header, or an item of a batch, says of a trajectory."""

    @property
    def trajectory_id(self) -> str:
        """Its name."""

    @property
    def num_tokens(self) -> int:
        """T."""

    @property
    def num_trainable_tokens(self) -> int:
        """Set bits of the loss mask."""

    @property
    def min_version(self) -> int:
        """Oldest version in its trainable spans."""

    @property
    def max_version(self) -> int:
        """Newest version in its trainable spans."""


@dataclass(frozen=True, slots=True)
class Trained:
    """The trainable part of a good trajectory."""

    num_tokens: int
    min_version: int
    max_version: int


def check_body(
    body: bytes, described: Described, *, max_abs_reward: float = math.inf
) -> tuple[trajectory_pb2.Trajectory, int]:
    """Return a serialized Trajectory that is as it is described, and the digest of its response: CRC-32 of its
    trainable token ids, 1 where that is 0. O(T) through views. Raises BadTrajectory.
    """
    name, num_tokens = described.trajectory_id, described.num_tokens
    try:
        trajectory = trajectory_pb2.Trajectory.FromString(body)
    except DecodeError:
        raise BadTrajectory(
            "bad_body", f"the body of {name} ({len(body)} bytes) is not a serialized Trajectory"
        ) from None
    if trajectory.trajectory_id != name:
        raise BadTrajectory(
            "id_mismatch", f"the body says trajectory_id {trajectory.trajectory_id!r}, its header {name!r}"
        )
    # Each look at a column of the message copies it.
    ids, logprobs, mask = trajectory.token_ids, trajectory.logprobs, trajectory.loss_mask
    is_half = trajectory.logprob_dtype == trajectory_pb2.LOGPROB_DTYPE_BF16
    _check_sizes(name, ids, logprobs, mask, num_tokens=num_tokens, width=2 if is_half else 4)
    token_ids, loss_mask = np.frombuffer(ids, dtype=_INT32), unpack_mask(mask, num_tokens)
    trained = check_columns(
        name,
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=as_logprobs(logprobs, is_half=is_half),
        version_spans=trajectory.version_spans,
        num_trainable=described.num_trainable_tokens,
    )
    if (trained.min_version, trained.max_version) != (described.min_version, described.max_version):
        raise BadTrajectory(
            "version_mismatch",
            f"{name}: trainable spans hold versions {trained.min_version}–{trained.max_version}, the header says "
            f"{described.min_version}–{described.max_version}",
        )
    check_turns(name, trajectory.turn_spans, num_tokens=num_tokens, max_abs_reward=max_abs_reward)
    return trajectory, zlib.crc32(token_ids[loss_mask].data) or 1


def batch_digest(trajectory_ids: Iterable[str]) -> bytes:
    """`Batch.digest`: sha256 over the ids in order, each followed by a newline; 32 bytes."""
    return hashlib.sha256("".join(f"{item}\n" for item in trajectory_ids).encode()).digest()


def check_columns(
    name: str,
    *,
    token_ids: NDArray[np.integer],
    loss_mask: NDArray[np.bool_],
    logprobs: NDArray[np.float32],
    version_spans: Iterable[VersionedSpan],
    num_trainable: int | None = None,
) -> Trained:
    """Return what is trainable of the columns [T] of trajectory `name`; `num_trainable` is what a header claims.

    O(T). Raises BadTrajectory.
    """
    num_tokens = len(token_ids)
    if num_tokens == 0:
        raise BadTrajectory("empty", f"{name}: no tokens; an episode without a trajectory sends none")
    if num_tokens > MAX_TOKENS:
        raise BadTrajectory("too_long", f"{name}: {num_tokens} tokens, at most {MAX_TOKENS}")
    if not len(loss_mask) == len(logprobs) == num_tokens:
        raise BadTrajectory(
            "length_mismatch",
            f"{name}: {num_tokens} token ids, {len(loss_mask)} mask entries, {len(logprobs)} log-probs; they must be "
            "equal",
        )
    _check_token_ids(name, token_ids)
    trainable = int(np.count_nonzero(loss_mask))
    if num_trainable is not None and trainable != num_trainable:
        raise BadTrajectory(
            "mask_mismatch", f"{name}: {trainable} mask bits are set, the header says {num_trainable}"
        )
    if trainable == 0:
        raise BadTrajectory(
            "no_trainable_tokens", f"{name}: no token is trainable; leave such a trajectory out"
        )
    _check_logprobs(name, logprobs, loss_mask)
    return _check_versions(name, version_spans, loss_mask, trainable=trainable)


def check_reward(name: str, reward: float, *, max_abs_reward: float = math.inf) -> None:
    """Raise BadTrajectory unless the reward is a finite number within the recipe's `dataflow.max_abs_reward`."""
    if not math.isfinite(reward):
        raise BadTrajectory(
            "nan_reward",
            f"{name}: reward {reward} is not finite; let the reward plug-in fail the episode instead",
        )
    if abs(reward) > max_abs_reward:
        raise _beyond(name, f"reward {reward:g}", max_abs_reward)


def check_metrics(name: str, metrics: Mapping[str, float], *, max_abs_reward: float) -> None:
    """Raise BadTrajectory for a metric beyond the recipe's `dataflow.max_abs_reward`; all are finite."""
    for metric, value in metrics.items():
        if abs(value) > max_abs_reward:
            raise _beyond(name, f"metric {metric!r} is {value:g}", max_abs_reward)


def _beyond(name: str, what: str, most: float) -> BadTrajectory:
    return BadTrajectory(
        "reward_range",
        f"{name}: {what}, dataflow.max_abs_reward allows -{most:g} to {most:g}, for sums of what is far larger are "
        "worth nothing; scale it down, or raise that setting in the recipe",
    )


def check_trainable(name: str, *, first_token_trained: bool, temperature: float) -> None:
    """Raise BadTrajectory for what only training refuses: an evaluation may be greedy and begin anywhere."""
    if not 0 < temperature < math.inf:
        raise BadTrajectory(
            "bad_temperature",
            f"{name}: sampling.temperature is {temperature}; the log-probs of training refer to one above 0: sample "
            "training tasks at a temperature above 0 and send it",
        )
    if first_token_trained:
        raise BadTrajectory(
            "first_token_trained",
            f"{name}: token 0 is in the loss mask, but nothing predicts it; begin with a prompt, or clear its bit",
        )


def check_row(name: str, token_ids: NDArray[np.integer], limits: RowLimits) -> None:
    """Raise BadTrajectory for a row that no trainer of its policy can train on. O(T)."""
    if len(token_ids) > limits.max_tokens:
        raise BadTrajectory(
            "too_long_to_train",
            f"{name}: {len(token_ids)} tokens, trainer.tokens_per_microbatch is {limits.max_tokens}; raise it, or "
            "bound prompts, turns and max_new_tokens",
        )
    if limits.vocab_size is not None and (largest := int(token_ids.max())) >= limits.vocab_size:
        raise BadTrajectory(
            "token_unknown",
            f"{name}: token id {largest}, the model knows ids from 0 to {limits.vocab_size - 1}; encode with this "
            "policy's own tokenizer",
        )


def check_spans(name: str, spans: Iterable[Span], *, num_tokens: int, what: str) -> None:
    """Raise BadTrajectory unless spans are ascending and disjoint within the tokens."""
    end = 0
    for span in spans:
        if not end <= span.start < span.end <= num_tokens:
            raise _bad_span(name, span, num_tokens=num_tokens, what=what)
        end = span.end


def check_turns(
    name: str, turns: Iterable[Turn], *, num_tokens: int, max_abs_reward: float = math.inf
) -> None:
    """Raise BadTrajectory unless turns are ascending and disjoint, and their rewards as `check_reward` wants them."""
    listed = list(turns)
    check_spans(name, listed, num_tokens=num_tokens, what="turn")
    for turn in listed:
        check_reward(f"{name}, turn [{turn.start}, {turn.end})", turn.reward, max_abs_reward=max_abs_reward)


def _bad_span(name: str, span: Span, *, num_tokens: int, what: str) -> BadTrajectory:
    return BadTrajectory(
        "bad_spans",
        f"{name}: {what} span [{span.start}, {span.end}) is not ascending and disjoint within {num_tokens} tokens",
    )


def _check_sizes(
    name: str, token_ids: bytes, logprobs: bytes, mask: bytes, *, num_tokens: int, width: int
) -> None:
    """Compare the bytes of each column with the tokens that the header names, and the mask's last bits with 0."""
    for column, held, needed in (
        ("token_ids", len(token_ids), 4 * num_tokens),
        ("logprobs", len(logprobs), width * num_tokens),
        ("loss_mask", len(mask), (num_tokens + 7) // 8),
    ):
        if held != needed:
            raise BadTrajectory(
                "length_mismatch",
                f"{name}: {column} holds {held} bytes, the {num_tokens} tokens of the header need {needed}",
            )
    used_bits = num_tokens & 7
    if used_bits and mask[-1] >> used_bits:
        raise BadTrajectory(
            "mask_padding", f"{name}: padding bits after token {num_tokens - 1} are set; clear them"
        )


def _check_token_ids(name: str, token_ids: NDArray[np.integer]) -> None:
    worst = int(token_ids.min())
    if worst >= 0 and token_ids.itemsize > 4:
        worst = int(token_ids.max())
    if not 0 <= worst <= _MAX_TOKEN_ID:
        raise BadTrajectory("token_out_of_range", f"{name}: token id {worst}; ids are in [0, 2^31)")


def _check_logprobs(name: str, logprobs: NDArray[np.float32], loss_mask: NDArray[np.bool_]) -> None:
    # One pass each for the largest and the smallest value: NaN wins both, infinities win one.
    largest, smallest = float(logprobs.max()), float(logprobs.min())
    if math.isnan(largest):
        raise BadTrajectory(
            "nan_logprob", f"{name}: log-prob of token {int(np.isnan(logprobs).argmax())} is NaN"
        )
    if math.isinf(largest) or math.isinf(smallest):
        raise BadTrajectory(
            "inf_logprob", f"{name}: log-probs span {smallest} to {largest}; they must be finite"
        )
    if largest > 0:
        raise BadTrajectory(
            "positive_logprob", f"{name}: log-prob {largest} of token {int(logprobs.argmax())} is above 0"
        )
    if np.count_nonzero(logprobs[~loss_mask]):
        raise BadTrajectory(
            "logprob_outside_mask", f"{name}: a token outside the loss mask has a log-prob; write 0 there"
        )


def _check_versions(
    name: str, spans: Iterable[VersionedSpan], loss_mask: NDArray[np.bool_], *, trainable: int
) -> Trained:
    end, covered, versions = 0, 0, []
    for span in spans:
        start, last, end = span.start, end, span.end
        if not last <= start < end <= len(loss_mask) or span.version < 0:
            raise _bad_span(
                name, span, num_tokens=len(loss_mask), what=f"version (here version {span.version})"
            )
        within = int(np.count_nonzero(loss_mask[start:end]))
        if within:
            covered += within
            versions.append(span.version)
    if covered != trainable:
        raise BadTrajectory(
            "spans_not_covering", f"{name}: version spans cover {covered} of {trainable} trainable tokens"
        )
    return Trained(trainable, min(versions), max(versions))
