"""One training step: rows in, updated weights and metrics out.

Owns the order of a step: advantages over the whole batch, packing, step-wide bounds, forward and backward per
micro-batch, guard, optimizer. Invariant: loss and gradient depend on the rows and the settings only, never on
packing, micro-batching or the number of ranks; and a step that a guard skips leaves weights, moments and
schedule untouched. Called by the trainer's loop.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from astraflow.recipe.algorithm import AlgorithmSettings, KlReference, ProximalAnchor
from astraflow.recipe.plugin_settings import PluginSettings
from astraflow_kit import failpoints
from astraflow_trainer.batches.packing import MicroBatch, filler, pack
from astraflow_trainer.batches.rows import TrainingRow
from astraflow_trainer.model.model import PolicyModel, TokenScores
from astraflow_trainer.model.optimizer import MasterOptimizer
from astraflow_trainer.ranks.reductions import OneRank, Ranks
from astraflow_trainer.step.estimators import Estimator, RankedRows, batch_advantages, role_metrics
from astraflow_trainer.step.losses import (
    LossInputs,
    LossMetrics,
    LossStatistics,
    StepCounts,
    StepRegion,
    policy_loss,
    resolve_region,
    token_weights,
)
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
    """Capacity of a lane; None takes the longest row of the step."""


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
    """Rows of the batch."""
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
    gradient_norm: float
    """Before clipping; 0 when no gradient was computed."""
    clip_low: float
    """Lower clip bound in use: the ratio is at least 1 − clip_low; 0 where the trust region has none."""
    clip_high: float
    """Upper clip bound in use: the ratio is at most 1 + clip_high; 0 where the trust region has none."""
    loss: LossMetrics | None
    """None when nothing was computed."""
    of_roles: Mapping[str, float] = field(default_factory=dict)
    """Rewards and advantages of each role, and running baselines after the step, by the names of their curves."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Plan:
    """What is known before the first forward pass."""

    batches: list[MicroBatch]
    advantage_R: torch.Tensor
    weight_R: torch.Tensor
    counts: StepCounts
    num_rows: int
    num_groups: int
    num_zero_variance_groups: int
    reward_mean: float
    of_roles: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Computed:
    """What forward and backward left behind, besides the gradient."""

    statistics: LossStatistics
    region: StepRegion


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
    `reference` is the frozen model of a KL term with `KlReference.MODEL`. Raises ValueError when it is
    missing, or when a row is longer than `tokens_per_microbatch`.
    """
    ranks = ranks or OneRank()
    _check_reference(settings.algorithm, reference=reference)
    plan = _plan(rows, settings=settings, ranks=ranks, baselines={} if baselines is None else baselines)
    if plan.counts.num_tokens == 0:
        return _metrics(plan, optimizer=optimizer, skip_reason=SkipReason.NO_SIGNAL)
    learning_rate = optimizer.learning_rate
    computed = _compute(policy, plan=plan, settings=settings, ranks=ranks, reference=reference, moved=moved)
    loss = computed.statistics.metrics()
    gradient_norm = optimizer.gradient_norm()
    skip_reason = _guard(loss.loss, gradient_norm=gradient_norm)
    if skip_reason is SkipReason.NONE:
        optimizer.step(gradient_norm=gradient_norm)
    else:
        optimizer.discard()
    return _metrics(
        plan,
        optimizer=optimizer,
        skip_reason=skip_reason,
        learning_rate=learning_rate,
        gradient_norm=gradient_norm,
        loss=loss,
        region=computed.region,
    )


def _check_reference(settings: AlgorithmSettings, *, reference: PolicyModel | None) -> None:
    needed = settings.kl is not None and settings.kl.reference is KlReference.MODEL
    if needed and reference is None:
        raise ValueError("the KL term compares with a reference model; pass it, or use KlReference.BEHAVIOR")


def _plan(
    rows: Sequence[TrainingRow], *, settings: StepSettings, ranks: Ranks, baselines: dict[str, float]
) -> _Plan:
    algorithm = settings.algorithm
    # A group may be spread over ranks, and so may a batch-wide baseline: all ranks normalise all rewards.
    everybody = RankedRows.gathered(rows, ranks=ranks)
    all_advantages = batch_advantages(
        everybody,
        default=_default(settings),
        of_role=settings.plugins.advantage_of_role,
        baselines=baselines,
    )
    baselines.update(all_advantages.baselines)
    advantages = torch.from_numpy(all_advantages.values[everybody.mine])
    kept = torch.ones_like(advantages, dtype=torch.bool)
    if algorithm.drop_zero_advantage and algorithm.kl is None:
        kept = advantages != 0
    kept_rows = [row for row, keep in zip(rows, kept.tolist(), strict=True) if keep]
    lengths = torch.tensor([row.num_trained_tokens for row in kept_rows], dtype=torch.int64)
    num_tokens, num_rows = ranks.sum(torch.tensor([int(lengths.sum()), len(kept_rows)])).tolist()
    counts = StepCounts(num_tokens=num_tokens, num_rows=num_rows)
    return _Plan(
        batches=_micro_batches(kept_rows, settings=settings, ranks=ranks),
        advantage_R=advantages[kept].float(),
        weight_R=token_weights(lengths, counts=counts, aggregation=algorithm.aggregation).float()
        if num_tokens
        else torch.zeros(0),
        counts=counts,
        num_rows=len(everybody.rewards),
        num_groups=all_advantages.num_groups,
        num_zero_variance_groups=all_advantages.num_zero_variance_groups,
        reward_mean=float(everybody.rewards.mean()) if len(everybody.rewards) else 0.0,
        of_roles=role_metrics(everybody, all_advantages),
    )


def _default(settings: StepSettings) -> Estimator:
    """What roles without an advantage of their own have."""
    given = settings.plugins.advantage or settings.algorithm.advantage
    assert not isinstance(given, PluginSettings), "make the plug-in and pass it"
    return given


def _micro_batches(rows: Sequence[TrainingRow], *, settings: StepSettings, ranks: Ranks) -> list[MicroBatch]:
    batches = pack(rows, token_budget=settings.tokens_per_microbatch, lane_tokens=settings.lane_tokens)
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
) -> _Computed:
    """Forward and backward of all micro-batches; the gradient is left on the model's parameters."""
    algorithm = settings.algorithm
    first = _first_pass(policy, plan=plan, settings=algorithm, moved=moved)
    region = settings.plugins.loss or resolve_region(
        torch.cat([scores.logprob_N for scores in first]) if first else torch.zeros(0),
        behavior_N=torch.cat([batch.behavior_logprob_N for batch in plan.batches])
        if first
        else torch.zeros(0),
        advantage_N=torch.cat([plan.advantage_R[batch.row_N] for batch in plan.batches])
        if first
        else torch.zeros(0),
        settings=algorithm,
        ranks=ranks,
    )
    statistics = LossStatistics.empty()
    for number, batch in enumerate(_begun(plan.batches, moved)):
        live = len(first) == 1
        scores = first[0] if live else policy.score(batch)
        inputs = _loss_inputs(
            batch, plan=plan, scores=scores, proximal=first[number] if first else None, reference=reference
        )
        loss, part = policy_loss(scores.logprob_N, inputs=inputs, region=region, settings=algorithm)
        # FSDP averages gradients over ranks; the step's loss is their sum.
        (loss * ranks.size).backward()
        statistics = statistics + part
    return _Computed(statistics=statistics.over_ranks(ranks), region=region)


def _begun(batches: Sequence[MicroBatch], moved: Callable[[], None]) -> Iterator[MicroBatch]:
    for batch in batches:
        moved()
        failpoints.hit("trainer.micro_batch")
        yield batch


def _first_pass(
    policy: PolicyModel, *, plan: _Plan, settings: AlgorithmSettings, moved: Callable[[], None]
) -> list[TokenScores]:
    """Scores of all micro-batches under the weights of the step's start; empty when nothing needs them.

    With a single micro-batch on every rank the scores keep their graph and serve as the forward pass too.
    """
    if not (settings.needs_step_bounds or isinstance(settings.anchor, ProximalAnchor)):
        return []
    with torch.set_grad_enabled(len(plan.batches) == 1):
        return [policy.score(batch) for batch in _begun(plan.batches, moved)]


def _loss_inputs(
    batch: MicroBatch,
    *,
    plan: _Plan,
    scores: TokenScores,
    proximal: TokenScores | None,
    reference: PolicyModel | None,
) -> LossInputs:
    reference_N = None
    if reference is not None:
        with torch.no_grad():
            reference_N = reference.score(batch).logprob_N
    return LossInputs(
        row_N=batch.row_N,
        num_rows=len(plan.advantage_R),
        advantage_N=plan.advantage_R[batch.row_N],
        weight_N=plan.weight_R[batch.row_N],
        behavior_N=batch.behavior_logprob_N,
        proximal_N=None if proximal is None else proximal.logprob_N.detach(),
        reference_N=reference_N,
        entropy_N=scores.entropy_N,
    )


def _guard(loss: float, *, gradient_norm: float) -> SkipReason:
    if not math.isfinite(loss):
        return SkipReason.NON_FINITE_LOSS
    if not math.isfinite(gradient_norm):
        return SkipReason.NON_FINITE_GRADIENT
    return SkipReason.NONE


def _metrics(
    plan: _Plan,
    *,
    optimizer: MasterOptimizer,
    skip_reason: SkipReason,
    learning_rate: float | None = None,
    gradient_norm: float = 0.0,
    loss: LossMetrics | None = None,
    region: StepRegion | None = None,
) -> StepMetrics:
    positions = sum(batch.token_ids_BL.numel() for batch in plan.batches)
    return StepMetrics(
        outcome=Outcome.COMMITTED if skip_reason is SkipReason.NONE else Outcome.SKIPPED,
        skip_reason=skip_reason,
        num_rows=plan.num_rows,
        num_trained_rows=plan.counts.num_rows,
        num_groups=plan.num_groups,
        num_zero_variance_groups=plan.num_zero_variance_groups,
        reward_mean=plan.reward_mean,
        num_micro_batches=len(plan.batches),
        packing_efficiency=sum(batch.num_row_tokens for batch in plan.batches) / positions
        if positions
        else 0.0,
        learning_rate=optimizer.learning_rate if learning_rate is None else learning_rate,
        gradient_norm=gradient_norm,
        clip_low=getattr(region, "low", 0.0),
        clip_high=getattr(region, "high", 0.0),
        loss=loss,
        of_roles=plan.of_roles,
    )
