"""The policy loss of some tokens: one kernel for every combination of anchor, trust region, aggregation and
KL.

Invariant: the loss of a step is the sum of this function's values over any split of its rows, because weights
and step-wide bounds are computed before and passed in. Called by the training step once per micro-batch.

Shape legend: N trained tokens. Symbols as in `astraflow.recipe.algorithm`.
"""

from dataclasses import dataclass
from typing import TypeAlias

import torch

from astraflow.plugins import TrainedTokens
from astraflow.recipe.algorithm import (
    AlgorithmSettings,
    BehaviorAnchor,
    Cispo,
    DualClip,
    Gspo,
    KlEstimator,
    M2po,
    M2poClip,
    M2poMask,
    NoTrustRegion,
    PpoClip,
    ProximalAnchor,
)
from astraflow.recipe.plugin_settings import PluginSettings
from astraflow_trainer.ranks.reductions import Ranks
from astraflow_trainer.step.losses.kl import kl_estimate
from astraflow_trainer.step.losses.second_moment import (
    MaskAbove,
    away_from_anchor,
    mask_threshold,
    sorted_suffix_bounds,
    water_filling_bounds,
)
from astraflow_trainer.step.losses.statistics import LossStatistics
from astraflow_trainer.step.plugins import PluginLoss

# exp(±20) is 5e8 and 2e-9: beyond any ratio worth weighing, well inside float32.
_MAX_LOG_RATIO = 20.0
_MAX_SEQUENCE_LOG_RATIO = 10.0

TrustRegion: TypeAlias = NoTrustRegion | PpoClip | DualClip | MaskAbove | Gspo | Cispo
StepRegion: TypeAlias = TrustRegion | PluginLoss
"""A trust region whose bounds are known: what `resolve_region` makes of the settings', or the recipe's own loss."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """Everything about N trained tokens except their log-probs. Rows are whole: no row spans two calls."""

    row_N: torch.Tensor
    """int64 index of the row, below `num_rows`."""
    num_rows: int
    advantage_N: torch.Tensor
    """float32."""
    weight_N: torch.Tensor
    """float32: the token's share in the aggregated loss."""
    behavior_N: torch.Tensor
    """float32: the sampler's log-probs."""
    proximal_N: torch.Tensor | None = None
    """float32: log-probs at the start of the step; needed by the proximal anchor."""
    reference_N: torch.Tensor | None = None
    """float32: the frozen reference model's log-probs; needed by a KL term with `KlReference.MODEL`."""
    entropy_N: torch.Tensor | None = None
    """float32, for the metrics; counted as 0 when absent."""
    in_place_N: torch.Tensor | None = None
    """bool, for the metrics: sampled with keys and values of other weights; none when absent."""


def resolve_region(
    logprob_N: torch.Tensor,
    *,
    behavior_N: torch.Tensor,
    advantage_N: torch.Tensor,
    settings: AlgorithmSettings,
    ranks: Ranks,
) -> StepRegion:
    """The trust region with its bounds fixed, given the log-probs of all trained tokens of this rank's step.

    A collective when `settings.needs_step_bounds`: every rank calls it once, and all get the same bounds.
    """
    region = settings.loss
    log_ratio = _log_ratio(logprob_N.detach(), anchor_N=behavior_N)
    squared = log_ratio.double().square()
    match region:
        case M2po():
            away = away_from_anchor(log_ratio, advantage_N=advantage_N)
            return water_filling_bounds(ranks.gather(squared[away]), region=region)
        case M2poClip():
            away = away_from_anchor(log_ratio, advantage_N=advantage_N)
            return sorted_suffix_bounds(ranks.gather(squared[away]), region=region)
        case M2poMask():
            return mask_threshold(ranks.gather(squared), region=region)
        case PluginSettings():
            raise ValueError(f"make the loss {region.use!r} and pass it as the region")
        case _:
            return region


def policy_loss(
    logprob_N: torch.Tensor, *, inputs: LossInputs, region: StepRegion, settings: AlgorithmSettings
) -> tuple[torch.Tensor, LossStatistics]:
    """This rank's share of the step's loss (a differentiable scalar) and its statistics."""
    anchor_N, anchor_weight_N = _anchor(inputs, settings=settings)
    log_ratio = _log_ratio(logprob_N, anchor_N=anchor_N)
    if isinstance(region, Gspo):
        log_ratio = _sequence_log_ratio(log_ratio, inputs=inputs)
    if isinstance(region, PluginLoss):
        surrogate = region.of(_trained_tokens(logprob_N, anchor_N=anchor_N, inputs=inputs))
    else:
        surrogate = _surrogate(logprob_N, log_ratio, advantage_N=inputs.advantage_N, region=region)
    loss_N = surrogate * anchor_weight_N
    kl_N = _kl(logprob_N, inputs=inputs, settings=settings)
    if kl_N is not None and settings.kl is not None:
        loss_N = loss_N + settings.kl.coefficient * kl_N
    agrees_N = _agrees(logprob_N.detach(), inputs=inputs, settings=settings)
    # Not a product: what is left out may not be finite.
    loss_N = torch.where(agrees_N, loss_N, torch.zeros_like(loss_N))
    loss = (inputs.weight_N * loss_N).sum()
    with torch.no_grad():
        statistics = _statistics(
            loss,
            logprob_N=logprob_N.detach(),
            log_ratio=log_ratio.detach(),
            kl_N=kl_N,
            inputs=inputs,
            region=region,
            agrees_N=agrees_N,
        )
    return loss, statistics


def cuts_alike(one: StepRegion, other: StepRegion, *, logprob_N: torch.Tensor, inputs: LossInputs) -> bool:
    """Whether two regions that differ in their bounds alone cut the same tokens, so that the gradients are equal."""
    log_ratio = _log_ratio(logprob_N, anchor_N=inputs.behavior_N)
    cuts = [
        _cut(log_ratio.exp(), log_ratio=log_ratio, advantage_N=inputs.advantage_N, region=region)
        for region in (one, other)
    ]
    return all(map(torch.equal, *cuts))


def _log_ratio(logprob_N: torch.Tensor, *, anchor_N: torch.Tensor) -> torch.Tensor:
    return (logprob_N - anchor_N).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def _anchor(inputs: LossInputs, *, settings: AlgorithmSettings) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Log-probs of the anchor, and the weight that corrects for the anchor not being the sampler."""
    match settings.anchor:
        case BehaviorAnchor():
            return inputs.behavior_N, 1.0
        case ProximalAnchor(weight_cap=cap):
            if inputs.proximal_N is None:
                raise ValueError(
                    "the proximal anchor needs log-probs of the start of the step; pass proximal_N"
                )
            return inputs.proximal_N, _log_ratio(inputs.proximal_N, anchor_N=inputs.behavior_N).exp().clamp(
                max=cap
            )


def _sequence_log_ratio(log_ratio_N: torch.Tensor, *, inputs: LossInputs) -> torch.Tensor:
    """Row means in value, token log-probs in gradient (GSPO-token)."""
    means = (
        _row_means(log_ratio_N.detach(), inputs=inputs)
        .clamp(max=_MAX_SEQUENCE_LOG_RATIO)
        .to(log_ratio_N.dtype)
    )
    return means[inputs.row_N] + log_ratio_N - log_ratio_N.detach()


def _row_means(values_N: torch.Tensor, *, inputs: LossInputs) -> torch.Tensor:
    """float64: the mean over the tokens of each row; 0 for a row without any."""
    zeros = torch.zeros(inputs.num_rows, dtype=torch.float64)
    sums = zeros.index_add(0, inputs.row_N, values_N.double())
    counts = zeros.index_add(0, inputs.row_N, torch.ones_like(inputs.row_N, dtype=torch.float64))
    return sums / counts.clamp(min=1)


def _agrees(logprob_N: torch.Tensor, *, inputs: LossInputs, settings: AlgorithmSettings) -> torch.Tensor:
    """bool[N]: whether trainer and engine agree on the token's row."""
    if settings.agreement is None:
        return torch.ones_like(logprob_N, dtype=torch.bool)
    kl_N = kl_estimate(inputs.behavior_N, reference_N=logprob_N, estimator=KlEstimator.K3)
    return (_row_means(kl_N, inputs=inputs) <= settings.agreement.max_kl)[inputs.row_N]


def _trained_tokens(logprob_N: torch.Tensor, *, anchor_N: torch.Tensor, inputs: LossInputs) -> TrainedTokens:
    return TrainedTokens(
        logprob=logprob_N,
        anchor_logprob=anchor_N,
        behavior_logprob=inputs.behavior_N,
        advantage=inputs.advantage_N,
        row=inputs.row_N,
        num_rows=inputs.num_rows,
    )


def _surrogate(
    logprob_N: torch.Tensor, log_ratio_N: torch.Tensor, *, advantage_N: torch.Tensor, region: TrustRegion
) -> torch.Tensor:
    """Loss per token before aggregation."""
    ratio = log_ratio_N.exp()
    match region:
        case NoTrustRegion():
            return -ratio * advantage_N
        case PpoClip(low=low, high=high) | Gspo(low=low, high=high):
            return _clipped(ratio, advantage_N=advantage_N, low=low, high=high)
        case DualClip(low=low, high=high, cap=cap):
            clipped = _clipped(ratio, advantage_N=advantage_N, low=low, high=high)
            return torch.where(advantage_N < 0, torch.minimum(clipped, -cap * advantage_N), clipped)
        case MaskAbove(threshold=threshold):
            kept = log_ratio_N.detach().double().square() < threshold
            return torch.where(kept, -ratio * advantage_N, torch.zeros_like(ratio))
        case Cispo(min_ratio=min_ratio, max_ratio=max_ratio):
            return -ratio.detach().clamp(min_ratio, max_ratio) * advantage_N * logprob_N


def _clipped(ratio: torch.Tensor, *, advantage_N: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return torch.maximum(-ratio * advantage_N, -ratio.clamp(1 - low, 1 + high) * advantage_N)


def _kl(logprob_N: torch.Tensor, *, inputs: LossInputs, settings: AlgorithmSettings) -> torch.Tensor | None:
    if settings.kl is None:
        return None
    reference = inputs.behavior_N if inputs.reference_N is None else inputs.reference_N
    return kl_estimate(logprob_N, reference_N=reference, estimator=settings.kl.estimator)


def _cut(
    ratio: torch.Tensor, *, log_ratio: torch.Tensor, advantage_N: torch.Tensor, region: StepRegion
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """bool[N] each: cut from above, cut from below, left out."""
    none = torch.zeros_like(ratio, dtype=torch.bool)
    match region:
        case PpoClip(low=low, high=high) | Gspo(low=low, high=high) | DualClip(low=low, high=high):
            above, below = (ratio > 1 + high) & (advantage_N > 0), (ratio < 1 - low) & (advantage_N < 0)
            if isinstance(region, DualClip):
                above = above | ((ratio > region.cap) & (advantage_N < 0))
            return above, below, none
        case Cispo(min_ratio=min_ratio, max_ratio=max_ratio):
            return ratio > max_ratio, ratio < min_ratio, none
        case MaskAbove(threshold=threshold):
            return none, none, log_ratio.double().square() >= threshold
        case NoTrustRegion() | PluginLoss():
            return none, none, none


def _statistics(
    loss: torch.Tensor,
    *,
    logprob_N: torch.Tensor,
    log_ratio: torch.Tensor,
    kl_N: torch.Tensor | None,
    inputs: LossInputs,
    region: StepRegion,
    agrees_N: torch.Tensor,
) -> LossStatistics:
    if logprob_N.numel() == 0:
        return LossStatistics.empty()
    ratio = log_ratio.exp()
    up, down, masked = _cut(ratio, log_ratio=log_ratio, advantage_N=inputs.advantage_N, region=region)
    away = away_from_anchor(log_ratio, advantage_N=inputs.advantage_N)
    squared = log_ratio.double().square()
    zero = torch.zeros(())
    mismatch_kl = kl_estimate(inputs.behavior_N, reference_N=logprob_N, estimator=KlEstimator.K3).double()
    in_place = torch.zeros_like(away) if inputs.in_place_N is None else inputs.in_place_N
    sums = {
        "num_tokens": torch.tensor(float(logprob_N.numel())), "loss": loss.detach(),
        "ratio": ratio.double().sum(), "squared_ratio": ratio.double().square().sum(),
        "squared_log_ratio": squared.sum(), "mismatch_kl": mismatch_kl.sum(),
        "in_place": in_place.sum(), "mismatch_kl_in_place": mismatch_kl[in_place].sum(),
        "entropy": zero if inputs.entropy_N is None else inputs.entropy_N.double().sum(),
        "kl": zero if kl_N is None else kl_N.double().sum(),
        "clipped_up": up.sum(), "clipped_down": down.sum(), "masked": masked.sum(), "disagreeing": (~agrees_N).sum(),
        "num_away": away.sum(), "squared_log_ratio_away": squared[away].sum(),
    }  # fmt: skip
    maxima = {
        "ratio": ratio.max(),
        "negative_ratio": (-ratio).max(),
        "abs_log_ratio": (logprob_N - inputs.behavior_N).abs().max(),
    }
    return LossStatistics.of(sums=sums, maxima=maxima)
