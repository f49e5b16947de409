"""Trust regions: the loss of each token given its ratio to the anchor, and which tokens a region cuts.

Each region is one small function of `RegionTokens`; formulas stand at the settings' classes. Invariant: a token's value
depends on its own row only. Called by the loss kernel. Shape legend: N trained tokens.
"""

from dataclasses import dataclass
from typing import TypeAlias

import torch

from astraflow.recipe.algorithm import Cispo, Dppo, DualClip, Gmpo, Gspo, NoTrustRegion, PpoClip, Sapo, Sft
from astraflow_trainer.step.losses.rows import row_means
from astraflow_trainer.step.losses.second_moment import MaskAbove
from astraflow_trainer.step.plugins import PluginLoss

_MAX_SEQUENCE_LOG_RATIO = 10.0

TrustRegion: TypeAlias = (
    NoTrustRegion | PpoClip | DualClip | MaskAbove | Gspo | Gmpo | Cispo | Sapo | Dppo | Sft
)
StepRegion: TypeAlias = TrustRegion | PluginLoss
"""A trust region whose bounds are known: what `resolve_region` makes of the settings', or the recipe's own loss."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RegionTokens:
    """What a trust region reads of N tokens."""

    logprob_N: torch.Tensor
    """float32, with gradient."""
    log_ratio_N: torch.Tensor
    """float32: l − l_a, clamped; with gradient."""
    behavior_N: torch.Tensor
    """float32."""
    advantage_N: torch.Tensor
    """float32."""
    row_N: torch.Tensor
    """int64."""
    num_rows: int


def region_log_ratio(tokens: RegionTokens, region: StepRegion) -> torch.Tensor:
    """float32[N]: the log-ratio that the region holds against its bounds; that of the row for GSPO and GMPO."""
    if isinstance(region, Gspo):
        return _of_rows(tokens.log_ratio_N, tokens=tokens)
    if isinstance(region, Gmpo):
        cut = torch.where(
            tokens.advantage_N > 0,
            tokens.log_ratio_N.clamp(max=region.high),
            tokens.log_ratio_N.clamp(min=-region.low),
        )
        return _of_rows(cut, tokens=tokens)
    return tokens.log_ratio_N


def surrogate(tokens: RegionTokens, log_ratio_N: torch.Tensor, *, region: TrustRegion) -> torch.Tensor:
    """float32[N]: loss per token before aggregation; `log_ratio_N` is that of `region_log_ratio`."""
    ratio, advantage = log_ratio_N.exp(), tokens.advantage_N
    match region:
        case NoTrustRegion() | Gmpo():
            return -ratio * advantage
        case PpoClip(low=low, high=high) | Gspo(low=low, high=high):
            return _clipped(ratio, advantage_N=advantage, low=low, high=high)
        case DualClip(low=low, high=high, cap=cap):
            clipped = _clipped(ratio, advantage_N=advantage, low=low, high=high)
            return torch.where(advantage < 0, torch.minimum(clipped, -cap * advantage), clipped)
        case MaskAbove() | Dppo():
            return torch.where(_left_out(tokens, region), torch.zeros_like(ratio), -ratio * advantage)
        case Cispo(min_ratio=min_ratio, max_ratio=max_ratio):
            return -ratio.detach().clamp(min_ratio, max_ratio) * advantage * tokens.logprob_N
        case Sapo(tau_positive=positive, tau_negative=negative):
            tau = torch.where(advantage > 0, torch.full_like(advantage, positive), negative)
            return -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantage
        case Sft():
            return -tokens.logprob_N


def cut(tokens: RegionTokens, *, region: StepRegion) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """bool[N] each: cut from above, cut from below, left out."""
    advantage = tokens.advantage_N
    none = torch.zeros_like(advantage, dtype=torch.bool)
    ratio = region_log_ratio(tokens, region).exp()
    match region:
        case PpoClip(low=low, high=high) | Gspo(low=low, high=high) | DualClip(low=low, high=high):
            above, below = (ratio > 1 + high) & (advantage > 0), (ratio < 1 - low) & (advantage < 0)
            if isinstance(region, DualClip):
                above = above | ((ratio > region.cap) & (advantage < 0))
            return above, below, none
        case Gmpo(low=low, high=high):
            log_ratio = tokens.log_ratio_N
            return (log_ratio > high) & (advantage > 0), (log_ratio < -low) & (advantage < 0), none
        case Cispo(min_ratio=min_ratio, max_ratio=max_ratio):
            return ratio > max_ratio, ratio < min_ratio, none
        case MaskAbove() | Dppo():
            return none, none, _left_out(tokens, region)
        case NoTrustRegion() | Sapo() | Sft() | PluginLoss():
            return none, none, none


def _left_out(tokens: RegionTokens, region: MaskAbove | Dppo) -> torch.Tensor:
    if isinstance(region, MaskAbove):
        return tokens.log_ratio_N.detach().double().square() >= region.threshold
    gained = tokens.logprob_N.detach().exp() - tokens.behavior_N.exp()
    advantage = tokens.advantage_N
    return ((advantage > 0) & (gained > region.high)) | ((advantage < 0) & (gained < -region.low))


def _of_rows(log_ratio_N: torch.Tensor, *, tokens: RegionTokens) -> torch.Tensor:
    """Row means in value, the tokens' own in gradient (GSPO-token): sums over the row have the gradient of its mean."""
    means = row_means(log_ratio_N.detach(), row_N=tokens.row_N, num_rows=tokens.num_rows)
    of_row = means.clamp(max=_MAX_SEQUENCE_LOG_RATIO).to(log_ratio_N.dtype)[tokens.row_N]
    return of_row + log_ratio_N - log_ratio_N.detach()


def _clipped(ratio: torch.Tensor, *, advantage_N: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return torch.maximum(-ratio * advantage_N, -ratio.clamp(1 - low, 1 + high) * advantage_N)
