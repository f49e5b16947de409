"""The policy loss of some tokens: one kernel for every combination of anchor, trust region, aggregation and
KL.

Invariant: the loss of a step is the sum of this function's values over any split of its rows, because weights
and step-wide bounds are computed before and passed in. Called by the training step once per micro-batch.

Shape legend: N trained tokens. Symbols as in `astraflow.recipe.algorithm`.
"""

from dataclasses import dataclass

import torch

from astraflow.plugins import TrainedTokens
from astraflow.recipe.algorithm import (
    AlgorithmSettings,
    BehaviorAnchor,
    BypassAnchor,
    KlEstimator,
    M2po,
    M2poClip,
    M2poMask,
    ProximalAnchor,
)
from astraflow.recipe.plugin_settings import PluginSettings
from astraflow_trainer.ranks.reductions import Ranks
from astraflow_trainer.step.losses.kl import kl_estimate
from astraflow_trainer.step.losses.mismatch import Compared, mismatch_weight, rejected
from astraflow_trainer.step.losses.second_moment import (
    away_from_anchor,
    mask_threshold,
    sorted_suffix_bounds,
    water_filling_bounds,
)
from astraflow_trainer.step.losses.statistics import LossStatistics
from astraflow_trainer.step.losses.trust_regions import (
    RegionTokens,
    StepRegion,
    cut,
    region_log_ratio,
    surrogate,
)
from astraflow_trainer.step.plugins import PluginLoss

# exp(±20) is 5e8 and 2e-9: beyond any ratio worth weighing, well inside float32.
_MAX_LOG_RATIO = 20.0


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
    """float32: with gradient where an entropy bonus needs it; counted as 0 in the metrics when absent."""
    in_place_N: torch.Tensor | None = None
    """bool, for the metrics: sampled with keys and values of other weights; none when absent."""


def resolve_region(
    logprob_N: torch.Tensor,
    *,
    anchor_N: torch.Tensor,
    advantage_N: torch.Tensor,
    settings: AlgorithmSettings,
    ranks: Ranks,
) -> StepRegion:
    """The trust region with its bounds fixed, given the log-probs of all trained tokens of this rank's step.

    A collective when `settings.needs_step_bounds`: every rank calls it once, and all get the same bounds.
    """
    region = settings.loss
    log_ratio = _log_ratio(logprob_N.detach(), anchor_N=anchor_N)
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
    tokens, anchor_N = _region_tokens(logprob_N, inputs=inputs, settings=settings)
    if isinstance(region, PluginLoss):
        loss_N = region.of(_trained_tokens(logprob_N, anchor_N=anchor_N, inputs=inputs))
    else:
        loss_N = surrogate(tokens, region_log_ratio(tokens, region), region=region)
    compared = Compared(
        start_N=logprob_N.detach() if inputs.proximal_N is None else inputs.proximal_N,
        anchor_N=anchor_N,
        behavior_N=inputs.behavior_N,
        row_N=inputs.row_N,
        num_rows=inputs.num_rows,
    )
    weight_N = mismatch_weight(compared, weight=settings.mismatch_weight)
    # Not products: what is left out may not be finite.
    loss_N = torch.where(weight_N == 0, torch.zeros_like(loss_N), loss_N * weight_N)
    kl_N = _kl(logprob_N, inputs=inputs, settings=settings)
    loss_N = loss_N + _other_terms(kl_N, inputs=inputs, settings=settings)
    rejected_N = rejected(compared, settings=settings.mismatch)
    loss = (inputs.weight_N * torch.where(rejected_N, torch.zeros_like(loss_N), loss_N)).sum()
    with torch.no_grad():
        statistics = _statistics(
            loss,
            tokens=tokens,
            kl_N=kl_N,
            inputs=inputs,
            region=region,
            rejected_N=rejected_N | (weight_N == 0),
        )
    return loss, statistics


def cuts_alike(
    one: StepRegion,
    other: StepRegion,
    *,
    logprob_N: torch.Tensor,
    inputs: LossInputs,
    settings: AlgorithmSettings,
) -> bool:
    """Whether two regions that differ in their bounds alone cut the same tokens, so that the gradients are equal."""
    tokens, _ = _region_tokens(logprob_N, inputs=inputs, settings=settings)
    return all(map(torch.equal, cut(tokens, region=one), cut(tokens, region=other)))


def _region_tokens(
    logprob_N: torch.Tensor, *, inputs: LossInputs, settings: AlgorithmSettings
) -> tuple[RegionTokens, torch.Tensor]:
    """What a trust region reads, and the log-probs of the anchor."""
    anchor_N = _anchor(logprob_N, inputs=inputs, settings=settings)
    tokens = RegionTokens(
        logprob_N=logprob_N,
        log_ratio_N=_log_ratio(logprob_N, anchor_N=anchor_N),
        behavior_N=inputs.behavior_N,
        advantage_N=inputs.advantage_N,
        row_N=inputs.row_N,
        num_rows=inputs.num_rows,
    )
    return tokens, anchor_N


def _log_ratio(logprob_N: torch.Tensor, *, anchor_N: torch.Tensor) -> torch.Tensor:
    return (logprob_N - anchor_N).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def _anchor(logprob_N: torch.Tensor, *, inputs: LossInputs, settings: AlgorithmSettings) -> torch.Tensor:
    """Log-probs of the anchor, without gradient."""
    match settings.anchor:
        case BehaviorAnchor():
            return inputs.behavior_N
        case BypassAnchor():
            return logprob_N.detach()
        case ProximalAnchor():
            if inputs.proximal_N is None:
                raise ValueError(
                    "the proximal anchor needs log-probs of the start of the step; pass proximal_N"
                )
            return inputs.proximal_N


def _trained_tokens(logprob_N: torch.Tensor, *, anchor_N: torch.Tensor, inputs: LossInputs) -> TrainedTokens:
    return TrainedTokens(
        logprob=logprob_N,
        anchor_logprob=anchor_N,
        behavior_logprob=inputs.behavior_N,
        advantage=inputs.advantage_N,
        row=inputs.row_N,
        num_rows=inputs.num_rows,
    )


def _kl(logprob_N: torch.Tensor, *, inputs: LossInputs, settings: AlgorithmSettings) -> torch.Tensor | None:
    if settings.kl is None or settings.kl.placement != "loss":
        return None
    reference = inputs.behavior_N if inputs.reference_N is None else inputs.reference_N
    return kl_estimate(logprob_N, reference_N=reference, estimator=settings.kl.estimator)


def _other_terms(
    kl_N: torch.Tensor | None, *, inputs: LossInputs, settings: AlgorithmSettings
) -> torch.Tensor | float:
    """What the loss has beside the policy's: the KL term and the entropy bonus."""
    result: torch.Tensor | float = 0.0
    if kl_N is not None and settings.kl is not None:
        result = settings.kl.coefficient * kl_N
    if settings.entropy is not None:
        if inputs.entropy_N is None:
            raise ValueError("the entropy bonus needs the entropy of each token; pass entropy_N")
        result = result - settings.entropy.coefficient * inputs.entropy_N
    return result


def _statistics(
    loss: torch.Tensor,
    *,
    tokens: RegionTokens,
    kl_N: torch.Tensor | None,
    inputs: LossInputs,
    region: StepRegion,
    rejected_N: torch.Tensor,
) -> LossStatistics:
    logprob_N = tokens.logprob_N
    if logprob_N.numel() == 0:
        return LossStatistics.empty()
    log_ratio = region_log_ratio(tokens, region)
    ratio = log_ratio.exp()
    up, down, masked = cut(tokens, region=region)
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
        "clipped_up": up.sum(), "clipped_down": down.sum(), "masked": masked.sum(), "rejected": rejected_N.sum(),
        "num_away": away.sum(), "squared_log_ratio_away": squared[away].sum(),
    }  # fmt: skip
    maxima = {
        "ratio": ratio.max(),
        "negative_ratio": (-ratio).max(),
        "abs_log_ratio": (logprob_N - inputs.behavior_N).abs().max(),
    }
    return LossStatistics.of(sums=sums, maxima=maxima, log_ratio_N=log_ratio)
