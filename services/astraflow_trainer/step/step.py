"""One training step: rows in, updated weights and metrics out.

Owns the order of a step: advantages over the whole batch, packing, the passes over all micro-batches, guard,
optimizer. Invariant: loss and gradient depend on the rows and the settings only, never on packing, micro-batching or
the number of ranks; and a step that a guard skips leaves weights, moments and schedule untouched. Called by the
trainer's loop.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

import torch

from astraflow.recipe import RowLimits
from astraflow.recipe.algorithm import AlgorithmSettings, KlReference
from astraflow.recipe.plugin_settings import PluginSettings
from astraflow_trainer.batches.fitting import Fitting, fitting_rows
from astraflow_trainer.batches.packing import MicroBatch, filler, pack
from astraflow_trainer.batches.rows import TrainingRow
from astraflow_trainer.model.model import PolicyModel
from astraflow_trainer.model.optimizer import MasterOptimizer
from astraflow_trainer.ranks.reductions import OneRank, Ranks
from astraflow_trainer.step.estimators import (
    Estimator,
    RankedRows,
    batch_advantages,
    overlong_penalties,
    role_metrics,
)
from astraflow_trainer.step.losses import LossMetrics, StepCounts, token_weights
from astraflow_trainer.step.passes import Computed, Passes
from astraflow_trainer.step.plugins import StepPlugins


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """How a batch becomes a step."""

    algorithm: AlgorithmSettings = field(default_factory=AlgorithmSettings)
    plugins: StepPlugins = field(default_factory=StepPlugins)
    """What the algorithm names of the recipe's own."""
    tokens_per_microbatch: int = 8192
    """Positions of one forward pass, padding included."""
    lane_tokens: int | None = None
    """Capacity of every lane; None takes what is cheapest for the rows of the step."""
    gradient_sync: Literal["step", "micro_batch"] = "step"
    """How often ranks add gradients up."""


class Outcome(StrEnum):
    """Whether the step changed the weights."""

    COMMITTED = "committed"
    SKIPPED = "skipped"


class SkipReason(StrEnum):
    """Why a step was skipped; NONE for a committed one."""

    NONE = "none"
    NO_SIGNAL = "no_signal"
    """Every advantage is 0, so the gradient is."""
    NON_FINITE_LOSS = "non_finite_loss"
    NON_FINITE_GRADIENT = "non_finite_gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """What a step did, over all ranks."""

    outcome: Outcome
    skip_reason: SkipReason
    num_rows: int
    """Rows of the batch that can be trained on."""
    num_left_out: int
    """Rows of groups with one that cannot."""
    num_trained_rows: int
    """Rows that were not left out for an advantage of 0."""
    num_groups: int
    num_zero_variance_groups: int
    reward_mean: float
    num_micro_batches: int
    """Of the rank that has most."""
    packing_efficiency: float
    """Tokens of rows / positions computed, on this rank; 0 when nothing was computed."""
    learning_rate: float
    """Of this step, whether or not it was committed."""
    gradient_norm: float = 0.0
    """Before clipping; 0 when no gradient was computed."""
    clip_low: float = 0.0
    """Lower clip bound in use: the ratio is at least 1 − clip_low; 0 where the trust region has none."""
    clip_high: float = 0.0
    """Upper clip bound in use: the ratio is at most 1 + clip_high; 0 where the trust region has none."""
    loss: LossMetrics | None = None
    """None when nothing was computed."""
    overlong_penalty_mean: float = 0.0
    """What long answers lost of their rewards, per row; `reward_mean` is without."""
    of_roles: Mapping[str, float] = field(default_factory=dict)
    """Rewards and advantages of each role, and running baselines after the step, by the names of their curves."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Plan:
    """What is known before the first forward pass."""

    batches: list[MicroBatch]
    advantage_R: torch.Tensor
    weight_R: torch.Tensor
    num_tokens: int
    """Trained tokens of all ranks."""
    metrics: StepMetrics
    """Of a step that stops here, for want of anything to train on."""


def train_step(
    policy: PolicyModel,
    *,
    optimizer: MasterOptimizer,
    rows: Sequence[TrainingRow],
    settings: StepSettings,
    ranks: Ranks | None = None,
    reference: PolicyModel | None = None,
    baselines: dict[str, float] | None = None,
    moved: Callable[[], None] = lambda: None,
) -> StepMetrics:
    """Train on this rank's `rows` of one batch; every rank calls it with its own share (which may be empty).

    `baselines` are the running baselines, by name: they become those after this batch, also when the step is skipped.
    `moved` is called whenever a micro-batch is begun.
    `reference` is the frozen model of a KL term with `KlReference.MODEL`. Raises ValueError when it is missing.
    Groups with a row that is longer than `tokens_per_microbatch`, or holds a token that the model does not know, are
    left out.
    """
    ranks = ranks or OneRank()
    _check_reference(settings.algorithm, reference=reference)
    limits = RowLimits(settings.tokens_per_microbatch, policy.vocab_size)
    fitting = fitting_rows(rows, limits=limits, ranks=ranks)
    plan = _plan(
        fitting,
        settings=settings,
        ranks=ranks,
        baselines={} if baselines is None else baselines,
        attention_tokens=policy.attention_tokens,
        learning_rate=optimizer.learning_rate,
    )
    if plan.num_tokens == 0:
        return plan.metrics
    computed = _compute(policy, plan=plan, settings=settings, ranks=ranks, reference=reference, moved=moved)
    loss = computed.statistics.metrics()
    gradient_norm = optimizer.gradient_norm()
    skip_reason = _guard(loss.loss, gradient_norm=gradient_norm)
    if skip_reason is SkipReason.NONE:
        optimizer.step(gradient_norm=gradient_norm)
    else:
        optimizer.discard()
    return replace(
        plan.metrics,
        outcome=Outcome.COMMITTED if skip_reason is SkipReason.NONE else Outcome.SKIPPED,
        skip_reason=skip_reason,
        gradient_norm=gradient_norm,
        clip_low=getattr(computed.region, "low", 0.0),
        clip_high=getattr(computed.region, "high", 0.0),
        loss=loss,
    )


def _check_reference(settings: AlgorithmSettings, *, reference: PolicyModel | None) -> None:
    needed = settings.kl is not None and settings.kl.reference is KlReference.MODEL
    if needed and reference is None:
        raise ValueError("the KL term compares with a reference model; pass it, or use KlReference.BEHAVIOR")


def _plan(
    fitting: Fitting,
    *,
    settings: StepSettings,
    ranks: Ranks,
    baselines: dict[str, float],
    attention_tokens: float,
    learning_rate: float,
) -> _Plan:
    algorithm, rows = settings.algorithm, fitting.rows
    # A group may be spread over ranks, and so may a batch-wide baseline: all ranks normalise all rewards.
    everybody = RankedRows.gathered(rows, ranks=ranks)
    penalties = overlong_penalties(everybody.lengths, settings=algorithm.overlong)
    all_advantages = batch_advantages(
        replace(everybody, rewards=everybody.rewards - penalties),
        default=_default(settings),
        of_role=settings.plugins.advantage_of_role,
        baselines=baselines,
    )
    baselines.update(all_advantages.baselines)
    advantages = torch.from_numpy(all_advantages.values[everybody.mine])
    kept = _kept(advantages, rows=rows, settings=algorithm)
    kept_rows = [row for row, keep in zip(rows, kept.tolist(), strict=True) if keep]
    lengths = torch.tensor([row.num_trained_tokens for row in kept_rows], dtype=torch.int64)
    num_tokens, num_rows = ranks.sum(torch.tensor([int(lengths.sum()), len(kept_rows)])).tolist()
    counts = StepCounts(num_tokens=num_tokens, num_rows=num_rows)
    batches = _micro_batches(kept_rows, settings=settings, ranks=ranks, attention_tokens=attention_tokens)
    return _Plan(
        batches=batches,
        advantage_R=advantages[kept].float(),
        weight_R=token_weights(lengths, counts=counts, aggregation=algorithm.aggregation).float()
        if num_tokens
        else torch.zeros(0),
        num_tokens=num_tokens,
        metrics=StepMetrics(
            outcome=Outcome.SKIPPED,
            skip_reason=SkipReason.NO_SIGNAL,
            num_rows=len(everybody.rewards),
            num_left_out=fitting.num_left_out,
            num_trained_rows=num_rows,
            num_groups=all_advantages.num_groups,
            num_zero_variance_groups=all_advantages.num_zero_variance_groups,
            reward_mean=float(everybody.rewards.mean()) if len(everybody.rewards) else 0.0,
            num_micro_batches=len(batches),
            packing_efficiency=_packing_efficiency(batches),
            learning_rate=learning_rate,
            overlong_penalty_mean=float(penalties.mean()) if len(penalties) else 0.0,
            of_roles=role_metrics(everybody, all_advantages),
        ),
    )


def _default(settings: StepSettings) -> Estimator:
    """What roles without an advantage of their own have."""
    given = settings.plugins.advantage or settings.algorithm.advantage
    assert not isinstance(given, PluginSettings), "make the plug-in and pass it"
    return given


def _kept(
    advantages: torch.Tensor, *, rows: Sequence[TrainingRow], settings: AlgorithmSettings
) -> torch.Tensor:
    kept = torch.ones_like(advantages, dtype=torch.bool)
    if settings.drop_zero_advantage and not settings.trains_without_advantage:
        kept = advantages != 0
    if settings.truncated == "mask":
        kept &= ~torch.tensor([row.truncated for row in rows], dtype=torch.bool)
    return kept


def _packing_efficiency(batches: Sequence[MicroBatch]) -> float:
    positions = sum(batch.token_ids_BL.numel() for batch in batches)
    return sum(batch.num_row_tokens for batch in batches) / max(1, positions)


def _micro_batches(
    rows: Sequence[TrainingRow], *, settings: StepSettings, ranks: Ranks, attention_tokens: float
) -> list[MicroBatch]:
    batches = pack(
        rows,
        token_budget=settings.tokens_per_microbatch,
        lane_tokens=settings.lane_tokens,
        attention_tokens=attention_tokens,
    )
    most = int(ranks.max(torch.tensor(len(batches))))
    return batches + [filler()] * (most - len(batches))


def _compute(
    policy: PolicyModel,
    *,
    plan: _Plan,
    settings: StepSettings,
    ranks: Ranks,
    reference: PolicyModel | None,
    moved: Callable[[], None],
) -> Computed:
    """Forward and backward of all micro-batches; the gradient is left on the model's parameters."""
    passes = Passes(
        policy=policy,
        batches=plan.batches,
        advantage_R=plan.advantage_R,
        weight_R=plan.weight_R,
        settings=settings.algorithm,
        own_loss=settings.plugins.loss,
        ranks=ranks,
        reference=reference,
        moved=moved,
        sync_each=settings.gradient_sync == "micro_batch",
    )
    return passes.compute()


def _guard(loss: float, *, gradient_norm: float) -> SkipReason:
    if not math.isfinite(loss):
        return SkipReason.NON_FINITE_LOSS
    if not math.isfinite(gradient_norm):
        return SkipReason.NON_FINITE_GRADIENT
    return SkipReason.NONE
