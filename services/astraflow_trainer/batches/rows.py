"""Training rows: the trajectories of one batch in the form that the compute core reads.

Invariant: a row that exists is trainable: its columns have one length, every trained token has a finite
log-prob and a weight version, and its first token (which nothing predicts) is never trained. Built from
contract messages by the batch source; read by packing and the training step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from astraflow.plugins import VersionSpan

__all__ = ["TrainingRow", "VersionSpan"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingRow:
    """One trajectory of T tokens, exactly as sampled. Raises ValueError when its columns disagree."""

    trajectory_id: str
    group_id: str
    """The rows that share a baseline: one task and one role (never the prompt alone)."""
    token_ids: NDArray[np.int32]
    """int32[T], prompt and observations included."""
    loss_mask: NDArray[np.bool_]
    """bool[T]; True where the policy generated the token and is trained on it."""
    behavior_logprobs: NDArray[np.float32]
    """float32[T], natural log at `temperature`; 0 where nothing was generated."""
    version_spans: tuple[VersionSpan, ...]
    """Ascending [start, end) ranges; together they cover every trained token."""
    reward: float
    temperature: float
    """Temperature that the log-probs refer to; greater than 0."""

    def __post_init__(self) -> None:
        problem = (
            _length_problem(self) or _scalar_problem(self) or _token_problem(self) or _span_problem(self)
        )
        if problem:
            raise ValueError(f"trajectory {self.trajectory_id!r}: {problem}")

    @property
    def num_tokens(self) -> int:
        """T: prompt, observations and generated tokens."""
        return len(self.token_ids)

    @property
    def num_trained_tokens(self) -> int:
        """Tokens that the loss covers; at least 1."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def min_version(self) -> int:
        """Oldest weight version among the spans: what staleness is measured from."""
        return min(span.version for span in self.version_spans)


def total_trained_tokens(rows: Sequence[TrainingRow]) -> int:
    """Tokens of `rows` that the loss covers."""
    return sum(row.num_trained_tokens for row in rows)


def _length_problem(row: TrainingRow) -> str | None:
    lengths = (len(row.token_ids), len(row.loss_mask), len(row.behavior_logprobs))
    if len(set(lengths)) != 1:
        return (
            f"{lengths[0]} token ids, {lengths[1]} mask entries, {lengths[2]} log-probs; they must be equal"
        )
    if lengths[0] < 2:
        return f"{lengths[0]} tokens; at least 2 are needed, one of them a prompt"
    return None


def _scalar_problem(row: TrainingRow) -> str | None:
    if not np.isfinite(row.reward):
        return f"reward {row.reward} is not finite; the dataflow server must refuse it at admission"
    if not (np.isfinite(row.temperature) and row.temperature > 0):
        return f"temperature {row.temperature} must be above 0; greedy samples have no distribution to train"
    return None


def _token_problem(row: TrainingRow) -> str | None:
    mask = row.loss_mask
    if mask[0]:
        return "its first token is marked as trained, but nothing predicts it; clear the mask there"
    if not mask.any():
        return "no token is trained; drop it before batching"
    if row.token_ids.min() < 0:
        return f"token id {row.token_ids.min()} is negative"
    trained = row.behavior_logprobs[mask]
    if not np.isfinite(trained).all():
        return f"{np.count_nonzero(~np.isfinite(trained))} log-probs of trained tokens are not finite"
    if row.behavior_logprobs[~mask].any():
        return "a token that was not generated carries a log-prob; it must be 0"
    return None


def _span_problem(row: TrainingRow) -> str | None:
    covered = np.zeros(row.num_tokens, dtype=bool)
    position = 0
    for span in row.version_spans:
        if not position <= span.start < span.end <= row.num_tokens or span.version < 0:
            return (
                f"version span [{span.start}, {span.end}) of version {span.version} is out of order or range"
            )
        covered[span.start : span.end] = True
        position = span.end
    missing = np.flatnonzero(row.loss_mask & ~covered)
    if missing.size:
        return f"trained token {missing[0]} has no weight version; spans must cover every trained token"
    return None
