"""The correction for the sampler not having been the policy at the start of the step: a weight, and what is left out.

Invariant: both depend on the token's own row only and have no gradient, and denominators do not know of them. Called by
the loss kernel. Formulas stand at the settings' classes. Shape legend: N trained tokens.
"""

from dataclasses import dataclass

import torch

from astraflow.recipe.algorithm import (
    AnyReject,
    AnyWeight,
    GeometricReject,
    IcePop,
    KlReject,
    Mis,
    MismatchSettings,
    NoWeight,
    Tis,
)
from astraflow_trainer.step.losses.rows import row_maxima, row_means, row_sums

_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compared:
    """Log-probs of N tokens, float32 and without gradient, under three policies, and their rows."""

    start_N: torch.Tensor
    """At the start of the step."""
    anchor_N: torch.Tensor
    behavior_N: torch.Tensor
    row_N: torch.Tensor
    """int64."""
    num_rows: int


def mismatch_weight(tokens: Compared, *, weight: AnyWeight) -> torch.Tensor:
    """float32[N]: the factor of each token's loss."""
    by_row = getattr(weight, "level", "token") == "sequence"
    judged = _ratio(tokens.start_N - tokens.behavior_N, tokens=tokens, by_row=by_row)
    importance = _ratio(tokens.anchor_N - tokens.behavior_N, tokens=tokens, by_row=by_row)
    match weight:
        case NoWeight():
            result = torch.ones_like(importance)
        case Tis(cap=cap):
            result = importance.clamp(max=cap)
        case Mis(low=low, cap=high) | IcePop(low=low, high=high):
            kept = (judged >= low) & (judged <= high)
            result = torch.where(kept, importance, torch.zeros_like(importance))
    return result.to(tokens.start_N.dtype)


def rejected(tokens: Compared, *, settings: MismatchSettings) -> torch.Tensor:
    """bool[N]: the tokens that are left out of the loss, with every term of it."""
    log_ratio = (tokens.start_N - tokens.behavior_N).double().clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    result = torch.zeros_like(log_ratio, dtype=torch.bool)
    if settings.reject is not None:
        result = _rejected(log_ratio, row_N=tokens.row_N, num_rows=tokens.num_rows, reject=settings.reject)
    if settings.veto is not None:
        ratio = log_ratio.exp()
        outside = (ratio < settings.veto.low) | (ratio > settings.veto.high)
        result = result | (row_sums(outside, row_N=tokens.row_N, num_rows=tokens.num_rows) > 0)[tokens.row_N]
    return result


def _rejected(
    log_ratio: torch.Tensor, *, row_N: torch.Tensor, num_rows: int, reject: AnyReject
) -> torch.Tensor:
    if isinstance(reject, GeometricReject):
        mean = row_means(log_ratio, row_N=row_N, num_rows=num_rows).exp()
        return ((mean < reject.low) | (mean > reject.high))[row_N]
    estimate = _estimate(log_ratio, reject)
    if reject.over == "token":
        return estimate.abs() > reject.max
    of_rows = {"mean": row_means, "max": row_maxima, "sum": row_sums}[reject.over]
    held = estimate.abs() if reject.over == "max" else estimate
    return (of_rows(held, row_N=row_N, num_rows=num_rows).abs() > reject.max)[row_N]


def _estimate(log_ratio: torch.Tensor, reject: KlReject) -> torch.Tensor:
    if reject.estimator == "k1":
        return -log_ratio
    if reject.estimator == "k2":
        return 0.5 * log_ratio.square()
    return torch.expm1(log_ratio) - log_ratio


def _ratio(log_ratio: torch.Tensor, *, tokens: Compared, by_row: bool) -> torch.Tensor:
    """float64[N]: the token's ratio, or that of its row, the product of its tokens'."""
    if by_row:
        log_ratio = row_sums(log_ratio, row_N=tokens.row_N, num_rows=tokens.num_rows)[tokens.row_N]
    return log_ratio.double().clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
