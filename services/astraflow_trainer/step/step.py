"""One training step: rows in, updated weights and metrics out.

Owns the order of a step: advantages over the whole batch, minibatches, and for each of them the passes over its
micro-batches, guard, optimizer. Invariant: loss and gradient depend on the rows and the settings only, never on
packing, micro-batching or the number of ranks; and an update that a guard skips leaves weights, moments and schedule
untouched. Called by the trainer's loop.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from astraflow.recipe import RowLimits
from astraflow.recipe.advantage import AdvantageSettings
from astraflow.recipe.algorithm import AlgorithmSettings, ProximalAnchor
from astraflow.recipe.plugin_settings import PluginSettings
from astraflow_trainer.batches.fitting import Fitting, fitting_rows
from astraflow_trainer.batches.packing import MicroBatch
from astraflow_trainer.batches.rows import TrainingRow
from astraflow_trainer.model.model import PolicyModel
from astraflow_trainer.model.optimizer import MasterOptimizer
from astraflow_trainer.ranks.reductions import OneRank, Ranks
from astraflow_trainer.step.advantages import Advantages
from astraflow_trainer.step.critic import Critic, CriticUpdate, critic_metrics, fit_metrics
from astraflow_trainer.step.estimators import (
    Estimator,
    RankedRows,
    batch_advantages,
    note_baselines,
    overlong_penalties,
    role_metrics,
)
from astraflow_trainer.step.groups import FloatArray
from astraflow_trainer.step.losses import LossMetrics, LossStatistics, StepRegion
from astraflow_trainer.step.minibatches import Minibatch, Packing, minibatches
from astraflow_trainer.step.passes import Passes
from astraflow_trainer.step.plugins import StepPlugins
from astraflow_trainer.step.token_advantages import (
    Penalised,
    kl_penalties,
    returns_for_critic,
    token_advantages,
)


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
    keep_logprobs: bool = False
    """Whether the metrics have the log-probs of the tokens."""


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
    CRITIC_WARMUP = "critic_warmup"
    """Only the critic learned."""


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
    """Of this step's first update, whether or not it was committed."""
    num_updates: int = 0
    """Updates of the weights: 1, or epochs · minibatches, less those that a guard skipped."""
    gradient_norm: float = 0.0
    """Before clipping, the mean over updates; 0 when no gradient was computed."""
    clip_low: float = 0.0
    """Lower clip bound in use: the ratio is at least 1 − clip_low; 0 where the trust region has none."""
    clip_high: float = 0.0
    """Upper clip bound in use: the ratio is at most 1 + clip_high; 0 where the trust region has none."""
    loss: LossMetrics | None = None
    """Over all updates: a token counts in each epoch; the loss is their mean. None when nothing was computed."""
    overlong_penalty_mean: float = 0.0
    """What long answers lost of their rewards, per row; `reward_mean` is without."""
    of_roles: Mapping[str, float] = field(default_factory=dict)
    """Rewards and advantages of each role, and running baselines after the step, by the names of their curves."""
    mismatch_kl: Mapping[str, float] = field(default_factory=dict, compare=False, repr=False)
    """As `Minibatch.mismatch_of_rows` has it, of each row of this rank that was trained on, before its first update."""
    of_critic: Mapping[str, float] = field(default_factory=dict)
    """Value loss and how well values foretold returns, by the names of their curves; empty without a critic."""
    logprobs: Mapping[str, NDArray[np.float32]] = field(default_factory=dict, compare=False, repr=False)
    """float32[T] of each row of this rank that was trained on, by trajectory: before the row's first update; NaN where
    nothing is trained. Where they are to be kept."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Plan:
    """What is known before the first forward pass of an update."""

    minibatches: list[Minibatch]
    """None when there is nothing to train on."""
    metrics: StepMetrics
    """Of a step that stops here."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Update:
    """What one update of the weights did, or why it did not."""

    statistics: LossStatistics
    gradient_norm: float
    region: StepRegion
    skip_reason: SkipReason
    logprobs: Sequence[torch.Tensor]
    """As `Computed` has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What every part of a step needs."""

    policy: PolicyModel
    settings: StepSettings
    ranks: Ranks
    reference: PolicyModel | None
    critic: Critic | None
    moved: Callable[[], None]

    @property
    def packing(self) -> Packing:
        """How rows become micro-batches."""
        return Packing(
            token_budget=self.settings.tokens_per_microbatch,
            lane_tokens=self.settings.lane_tokens,
            attention_tokens=self.policy.attention_tokens,
        )

    def passes(self, minibatch: Minibatch, *, starts: Sequence[torch.Tensor] | None = None) -> Passes:
        """Forward and backward of all micro-batches; the gradient is left on the model's parameters."""
        kl = self.settings.algorithm.kl
        return Passes(
            policy=self.policy,
            minibatch=minibatch,
            starts=starts,
            settings=self.settings.algorithm,
            own_loss=self.settings.plugins.loss,
            ranks=self.ranks,
            reference=self.reference if kl is not None and kl.placement == "loss" else None,
            moved=self.moved,
            sync_each=self.sync_each,
        )

    @property
    def sync_each(self) -> bool:
        """Whether ranks add up the gradient of each micro-batch."""
        return self.settings.gradient_sync == "micro_batch"


def train_step(
    policy: PolicyModel,
    *,
    optimizer: MasterOptimizer,
    rows: Sequence[TrainingRow],
    settings: StepSettings,
    ranks: Ranks | None = None,
    reference: PolicyModel | None = None,
    critic: Critic | None = None,
    baselines: dict[str, float] | None = None,
    moved: Callable[[], None] = lambda: None,
) -> StepMetrics:
    """Train on this rank's `rows` of one batch; every rank calls it with its own share (which may be empty).

    `baselines` are the running baselines, by name: they become those after this batch, also when the step is skipped.
    `moved` is called whenever a micro-batch is begun.
    `reference` is the frozen model that a KL term compares with, `critic` what advantage `gae` does. Raises ValueError
    when one is missing.
    Groups with a row that is longer than `tokens_per_microbatch`, or holds a token that the model does not know, are
    left out.
    """
    algorithm = settings.algorithm
    if algorithm.kl is not None and algorithm.kl.needs_model and reference is None:
        raise ValueError("the KL term compares with a reference model; pass it, or use KlReference.BEHAVIOR")
    if algorithm.critic is not None and critic is None:
        raise ValueError("the algorithm has a critic; pass it")
    work = _Work(
        policy=policy,
        settings=settings,
        ranks=ranks or OneRank(),
        reference=reference,
        critic=critic,
        moved=moved,
    )
    limits = RowLimits(settings.tokens_per_microbatch, policy.vocab_size)
    fitting = fitting_rows(rows, limits=limits, ranks=work.ranks, routers=policy.routers.shape)
    plan = _plan(
        fitting,
        work=work,
        baselines={} if baselines is None else baselines,
        learning_rate=optimizer.learning_rate,
    )
    learned: list[CriticUpdate] = []
    updates = list(_updates(plan.minibatches, work=work, optimizer=optimizer, learned=learned))
    metrics = _measured(updates, before=plan.metrics) if updates else plan.metrics
    if learned:
        reason = metrics.skip_reason if updates else SkipReason.CRITIC_WARMUP
        of_critic = {**metrics.of_critic, **critic_metrics(learned)}
        metrics = replace(metrics, skip_reason=reason, of_critic=of_critic)
    return _with_logprobs(metrics, plan, updates, keep=settings.keep_logprobs)


def _with_logprobs(
    metrics: StepMetrics, plan: _Plan, updates: Sequence[_Update], *, keep: bool
) -> StepMetrics:
    """The metrics with what the rows' log-probs were before their first update, and how far from the engine's."""
    logprobs: dict[str, NDArray[np.float32]] = {}
    mismatch: dict[str, float] = {}
    # Those of the first epoch come first.
    for minibatch, update in zip(plan.minibatches, updates, strict=False):
        mismatch |= minibatch.mismatch_of_rows(update.logprobs)
        if keep:
            logprobs |= minibatch.of_rows(update.logprobs)
    return replace(metrics, logprobs=logprobs, mismatch_kl=mismatch)


def _updates(
    minibatches: Sequence[Minibatch],
    *,
    work: _Work,
    optimizer: MasterOptimizer,
    learned: list[CriticUpdate],
) -> Iterator[_Update]:
    """Take them: each minibatch in each epoch. Log-probs of the start are kept where a later update needs them. What
    the critic learns before each is added to `learned`; while it is alone there are none of the policy's.
    """
    critic = work.critic
    is_alone = critic is not None and critic.is_alone(work.settings.algorithm)
    algorithm, starts = work.settings.algorithm, list[list[torch.Tensor] | None]([None] * len(minibatches))
    needs_starts = isinstance(algorithm.anchor, ProximalAnchor) and not is_alone
    if needs_starts and len(minibatches) * algorithm.epochs > 1:
        starts = [work.passes(minibatch).log_probs() for minibatch in minibatches]
    for _ in range(algorithm.epochs):
        for minibatch, start in zip(minibatches, starts, strict=True):
            if critic is not None:
                learned.append(
                    critic.update(minibatch, ranks=work.ranks, sync_each=work.sync_each, moved=work.moved)
                )
            if is_alone:
                continue
            computed = work.passes(minibatch, starts=start).compute()
            gradient_norm = optimizer.gradient_norm()
            reason = _guard(computed.statistics.metrics().loss, gradient_norm=gradient_norm)
            if reason is SkipReason.NONE:
                optimizer.step(gradient_norm=gradient_norm)
            else:
                optimizer.discard()
            yield _Update(
                statistics=computed.statistics,
                gradient_norm=gradient_norm,
                region=computed.region,
                skip_reason=reason,
                logprobs=computed.logprobs,
            )


def _measured(updates: Sequence[_Update], *, before: StepMetrics) -> StepMetrics:
    """The metrics of a step of these updates. It is committed when one of them is."""
    taken = [update for update in updates if update.skip_reason is SkipReason.NONE]
    shown = taken or updates
    statistics = sum((update.statistics for update in shown), start=LossStatistics.empty())
    loss = statistics.metrics()
    return replace(
        before,
        outcome=Outcome.COMMITTED if taken else Outcome.SKIPPED,
        skip_reason=shown[-1].skip_reason,
        num_updates=len(taken),
        gradient_norm=sum(update.gradient_norm for update in shown) / len(shown),
        clip_low=getattr(shown[-1].region, "low", 0.0),
        clip_high=getattr(shown[-1].region, "high", 0.0),
        loss=replace(loss, loss=loss.loss / len(shown)),
    )


def _plan(fitting: Fitting, *, work: _Work, baselines: dict[str, float], learning_rate: float) -> _Plan:
    settings, ranks, rows = work.settings, work.ranks, fitting.rows
    algorithm = settings.algorithm
    # A group may be spread over ranks, and so may a batch-wide baseline: all ranks normalise all rewards.
    everybody = RankedRows.gathered(rows, ranks=ranks)
    penalised = _penalised(rows, work=work)
    overlong = overlong_penalties(everybody.lengths, settings=algorithm.overlong)
    lost = overlong + _lost(penalised, work=work)
    all_advantages = _of_rows(everybody, lost=lost, work=work, baselines=baselines)
    advantages = token_advantages(
        all_advantages.values[everybody.mine].tolist(),
        penalised,
        kl=algorithm.kl,
        whitened=_whitening(settings),
        ranks=ranks,
    )
    goals = _goals(all_advantages.values[everybody.mine], penalised, work=work)
    kept = [_is_kept(row, given, settings=algorithm) for row, given in zip(rows, advantages, strict=True)]
    of_all = ranks.gather(torch.tensor(kept, dtype=torch.int64)).tolist()
    updates = minibatches(
        [row for row, keep in zip(rows, kept, strict=True) if keep],
        [given for given, keep in zip(advantages, kept, strict=True) if keep],
        goals=[[given for given, keep in zip(goal, kept, strict=True) if keep] for goal in goals],
        tasks=[origin.task_id for origin, keep in zip(everybody.origins, of_all, strict=True) if keep],
        number=algorithm.minibatches,
        packing=work.packing,
        aggregation=algorithm.aggregation,
        ranks=ranks,
    )
    taken = list(updates)
    batches = [batch for minibatch in taken for batch in minibatch.batches]
    return _Plan(
        minibatches=taken,
        metrics=StepMetrics(
            outcome=Outcome.SKIPPED,
            skip_reason=SkipReason.NO_SIGNAL,
            num_rows=len(everybody.rewards),
            num_left_out=fitting.num_left_out,
            num_trained_rows=sum(of_all),
            num_groups=all_advantages.num_groups,
            num_zero_variance_groups=all_advantages.num_zero_variance_groups,
            reward_mean=float(everybody.rewards.mean()) if len(everybody.rewards) else 0.0,
            num_micro_batches=len(batches),
            packing_efficiency=_packing_efficiency(batches),
            learning_rate=learning_rate,
            overlong_penalty_mean=float(overlong.mean()) if len(overlong) else 0.0,
            of_roles=role_metrics(everybody, all_advantages),
            of_critic=fit_metrics(*goals, ranks=ranks) if goals else {},
        ),
    )


def _of_rows(
    everybody: RankedRows, *, lost: FloatArray, work: _Work, baselines: dict[str, float]
) -> Advantages:
    """Advantages of the rows of all ranks, less `lost` of their rewards; `baselines` become those after the batch."""
    found = batch_advantages(
        replace(everybody, rewards=everybody.rewards - lost),
        default=_default(work.settings),
        of_role=work.settings.plugins.advantage_of_role,
        baselines=baselines,
    )
    note_baselines(baselines, found.baselines)
    return found


def _goals(
    values: FloatArray, rows: Sequence[Penalised], *, work: _Work
) -> tuple[list[FloatArray], list[FloatArray]] | tuple[()]:
    """What the critic expected of each token of this rank's rows, and what they returned; nothing without one."""
    if work.critic is None:
        return ()
    return [row.values for row in rows], returns_for_critic(
        values.tolist(), rows, kl=work.settings.algorithm.kl
    )


def _penalised(rows: Sequence[TrainingRow], *, work: _Work) -> list[Penalised]:
    """Each row with its estimator, what a KL term outside the loss takes from its tokens, and what a critic expects of
    them; a collective.
    """
    settings, critic = work.settings, work.critic
    kl, outside = settings.algorithm.kl, settings.algorithm.has_kl_outside_the_loss
    num_tokens = [row.num_trained_tokens for row in rows]
    batches = work.packing.micro_batches(rows, ranks=work.ranks) if outside or critic else []
    penalties = kl_penalties(work.policy, batches, num_tokens=num_tokens, kl=kl, reference=work.reference)
    expected: Sequence[FloatArray | None] = [None] * len(rows)
    if critic is not None:
        expected = critic.expected(batches, num_tokens=num_tokens)
    of_role, default = settings.plugins.advantage_of_role, _default(settings)
    return [
        Penalised(estimator=of_role.get(row.origin.role, default), lost=lost, expected=values)
        for row, lost, values in zip(rows, penalties, expected, strict=True)
    ]


def _lost(rows: Sequence[Penalised], *, work: _Work) -> FloatArray:
    """float64 of the rows of all ranks: what the KL term takes from the reward of each as a whole."""
    kl = work.settings.algorithm.kl
    if kl is None or kl.placement != "reward":
        return np.zeros(1)
    sums = [0.0 if row.by_token else float(row.lost.sum()) for row in rows]
    lost: FloatArray = work.ranks.gather(torch.tensor(sums, dtype=torch.float64)).numpy()
    return lost


def _whitening(settings: StepSettings) -> list[AdvantageSettings]:
    """The estimators that whiten, each once."""
    known = [_default(settings), *settings.plugins.advantage_of_role.values()]
    whiten = [given for given in known if isinstance(given, AdvantageSettings) and given.whiten]
    return [given for place, given in enumerate(whiten) if given not in whiten[:place]]


def _default(settings: StepSettings) -> Estimator:
    """What roles without an advantage of their own have."""
    given = settings.plugins.advantage or settings.algorithm.advantage
    assert not isinstance(given, PluginSettings), "make the plug-in and pass it"
    return given


def _is_kept(row: TrainingRow, advantages: FloatArray, *, settings: AlgorithmSettings) -> bool:
    if settings.truncated == "mask" and row.truncated:
        return False
    if settings.drop_zero_advantage and not settings.trains_without_advantage:
        return bool(advantages.any())
    return True


def _packing_efficiency(batches: Sequence[MicroBatch]) -> float:
    positions = sum(batch.token_ids_BL.numel() for batch in batches)
    return sum(batch.num_row_tokens for batch in batches) / max(1, positions)


def _guard(loss: float, *, gradient_norm: float) -> SkipReason:
    if not math.isfinite(loss):
        return SkipReason.NON_FINITE_LOSS
    if not math.isfinite(gradient_norm):
        return SkipReason.NON_FINITE_GRADIENT
    return SkipReason.NONE
