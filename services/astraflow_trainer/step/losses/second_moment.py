"""Second-moment bounds: the three trust regions known as M2PO, computed over the whole step.

Each function maps squared log-ratios to bounds; the set they are taken over comes from `away_from_anchor`.
Invariant: the result depends on the multiset of values only, so it is the same for every packing,
micro-batching and number of ranks. Called by the training step once the log-probs of all its tokens are
known.
"""

import math
from dataclasses import dataclass

import torch

from astraflow.recipe.algorithm import M2po, M2poClip, M2poMask, PpoClip

# "Do not clip" as the authors write it: the lower bound is ratio 0, the upper one beyond any ratio.
UNCLIPPED = PpoClip(low=1.0, high=1e5)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskAbove:
    """Tokens with d² at or above `threshold` are left out of the sum."""

    threshold: float


def away_from_anchor(log_ratio_N: torch.Tensor, *, advantage_N: torch.Tensor) -> torch.Tensor:
    """bool[N]: tokens that already moved where their advantage pushes them (A > 0, r > 1 or A < 0, r < 1)."""
    return log_ratio_N * advantage_N.sign() > 0


def water_filling_bounds(squared_N: torch.Tensor, *, region: M2po) -> PpoClip:
    """Bounds of `M2po` from d² of the tokens that moved away (float64[N], any order)."""
    num_tokens = squared_N.numel()
    if num_tokens == 0 or float(squared_N.double().mean()) <= region.budget:
        return UNCLIPPED
    ascending = squared_N.double().sort().values
    # With the cap at the k-th value, k tokens keep theirs and the rest count as the cap.
    kept = ascending.cumsum(0)
    capped = ascending * torch.arange(num_tokens - 1, -1, -1, dtype=torch.float64)
    total = region.budget * num_tokens
    # The mean exceeds the budget, so at least one token is capped; rounding must not say otherwise.
    num_kept = min(int((kept + capped < total).sum()), num_tokens - 1)
    below = float(kept[num_kept - 1]) if num_kept else 0.0
    cap = math.sqrt((total - below) / (num_tokens - num_kept))
    return PpoClip(
        low=max(region.floor_low, -math.expm1(-cap)),
        high=max(region.floor_high, math.expm1(cap)),
    )


def sorted_suffix_bounds(squared_N: torch.Tensor, *, region: M2poClip) -> PpoClip:
    """Bounds of `M2poClip` from d² of the tokens that moved away (float64[N], any order)."""
    num_tokens = squared_N.numel()
    if num_tokens == 0 or float(squared_N.double().mean()) <= region.budget:
        return PpoClip(low=region.cap_low, high=region.cap_high)
    ascending = squared_N.double().sort().values
    # Position i ascending is the suffix of the i + 1 smallest; the largest suffix below the budget is the
    # first found.
    means = ascending.cumsum(0) / torch.arange(1, num_tokens + 1, dtype=torch.float64)
    within = int((means < region.budget).sum())
    bound = math.sqrt(float(ascending[max(within - 1, 0)]))
    return PpoClip(
        low=min(region.cap_low, -math.expm1(-bound)),
        high=min(region.cap_high, math.expm1(bound)),
    )


def mask_threshold(squared_N: torch.Tensor, *, region: M2poMask) -> MaskAbove:
    """Threshold of `M2poMask` from d² of all trained tokens (float64[N], any order).

    Equal values at the border are dropped together, which keeps the mean of the rest below the budget.
    """
    if squared_N.numel() == 0:
        return MaskAbove(threshold=math.inf)
    ascending = squared_N.double().sort().values
    means = ascending.cumsum(0) / torch.arange(1, ascending.numel() + 1, dtype=torch.float64)
    num_kept = int((means < region.budget).sum())
    if num_kept == ascending.numel():
        return MaskAbove(threshold=math.inf)
    return MaskAbove(threshold=float(ascending[num_kept]))
