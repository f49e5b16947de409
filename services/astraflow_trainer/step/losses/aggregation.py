"""Aggregation as weights: every way of averaging token losses is a sum of weight times loss.

Invariant: weights depend on global counts (all micro-batches, all ranks) and on the token's own row only, so
the sum over any split of the tokens is the loss of the step. Called by the training step once per batch.
"""

from dataclasses import dataclass

import torch

from astraflow.recipe.algorithm import (
    Aggregation,
    Constant,
    SeqMeanTokenMean,
    SeqMeanTokenSum,
    TokenMean,
    TokenSum,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """What the denominators count, over all ranks."""

    num_tokens: int
    num_rows: int


def token_weights(
    row_lengths_R: torch.Tensor, *, counts: StepCounts, aggregation: Aggregation
) -> torch.Tensor:
    """float64[R]: the weight of each trained token of a row, given its trained-token count (int64[R])."""
    lengths = row_lengths_R.double()
    match aggregation:
        case TokenMean():
            return torch.full_like(lengths, 1.0 / counts.num_tokens)
        case TokenSum():
            return torch.ones_like(lengths)
        case SeqMeanTokenMean():
            return 1.0 / (lengths * counts.num_rows)
        case SeqMeanTokenSum():
            return torch.full_like(lengths, 1.0 / counts.num_rows)
        case Constant(length=length):
            return torch.full_like(lengths, 1.0 / (counts.num_rows * length))
