"""The passes of a step: forward and backward over all micro-batches, which leave the gradient on the parameters.

Invariant: loss and gradient are those of the whole step with one trust region, whatever the micro-batches. A region
whose bounds depend on all tokens is known after the last forward pass only. As a rule it then cuts nothing, so each
micro-batch is taken as if it did not, and where the bounds turn out to cut tokens, the micro-batches that hold them are
computed once more, with the difference as their loss: gradients add. Called by the training step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from astraflow.recipe.algorithm import AlgorithmSettings, ProximalAnchor
from astraflow_kit import failpoints
from astraflow_trainer.batches.packing import MicroBatch, filler
from astraflow_trainer.model.model import PolicyModel, TokenScores
from astraflow_trainer.ranks.reductions import Ranks
from astraflow_trainer.step.losses import (
    LossInputs,
    LossStatistics,
    StepRegion,
    cuts_alike,
    policy_loss,
    resolve_region,
)
from astraflow_trainer.step.plugins import PluginLoss


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Computed:
    """What forward and backward left behind, besides the gradient."""

    statistics: LossStatistics
    """Over all ranks."""
    region: StepRegion


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Passes:
    """What this rank computes of a step."""

    policy: PolicyModel
    batches: Sequence[MicroBatch]
    """As many on every rank."""
    advantage_R: torch.Tensor
    """float32, of each row."""
    weight_R: torch.Tensor
    """float32: what each token of a row weighs in the step's loss."""
    settings: AlgorithmSettings
    own_loss: PluginLoss | None
    ranks: Ranks
    reference: PolicyModel | None
    moved: Callable[[], None]
    """Called whenever a micro-batch is begun."""
    sync_each: bool
    """Whether ranks add up the gradient of each micro-batch, or once that of all."""

    def compute(self) -> Computed:
        """Run them; a collective."""
        if len(self.batches) == 1:
            return self._in_one()
        if isinstance(self.settings.anchor, ProximalAnchor):
            first = self._scored(self.batches)
            return self._with(self._region(first), proximal=first)
        if self.settings.needs_step_bounds:
            return self._with_step_bounds()
        return self._with(self._region([]))

    def _in_one(self) -> Computed:
        """With a single micro-batch on every rank its scores serve for everything."""
        (batch,) = self._begun(self.batches)
        scores = self.policy.score(batch)
        region = self._region([scores])
        statistics = self._backward(batch, scores, region=region, proximal=scores, is_last=True)
        return Computed(statistics=statistics.over_ranks(self.ranks), region=region)

    def _with(self, region: StepRegion, *, proximal: Sequence[TokenScores] = ()) -> Computed:
        """Forward and backward under a region that is known."""
        statistics = LossStatistics.empty()
        for number, batch in enumerate(self._begun(self.batches)):
            statistics += self._backward(
                batch,
                self.policy.score(batch),
                region=region,
                proximal=proximal[number] if proximal else None,
                is_last=number == len(self.batches) - 1,
            )
        return Computed(statistics=statistics.over_ranks(self.ranks), region=region)

    def _with_step_bounds(self) -> Computed:
        """One forward pass where the bounds cut nothing; as a sample says beforehand, the first micro-batch of every
        rank. Else one before, without gradient.
        """
        lax = self._region([])
        first, *others = self._begun(self.batches)
        scores = [self.policy.score(first)]
        if self._region(scores) != lax:
            scores = [_kept(scores[0]), *self._scored(others)]
            return self._with(self._region(scores))
        self._backward(first, scores[0], region=lax, is_last=False)
        scores = [_kept(scores[0])]
        for number, batch in enumerate(others, start=2):
            scores.append(self.policy.score(batch))
            self._backward(batch, scores[-1], region=lax, is_last=number == len(self.batches))
            scores[-1] = _kept(scores[-1])
        region = self._region(scores)
        return self._corrected(scores, taken_as=lax, region=region)

    def _corrected(
        self, scores: Sequence[TokenScores], *, taken_as: StepRegion, region: StepRegion
    ) -> Computed:
        """Add to the gradient what `region` makes of the micro-batches that it cuts otherwise than `taken_as`."""
        statistics, differing = LossStatistics.empty(), []
        for batch, known in zip(self.batches, scores, strict=True):
            inputs = self._inputs(batch, known, proximal=None)
            statistics += policy_loss(known.logprob_N, inputs=inputs, region=region, settings=self.settings)[
                1
            ]
            if not cuts_alike(
                taken_as, region, logprob_N=known.logprob_N, inputs=inputs, settings=self.settings
            ):
                differing.append(batch)
        most = int(self.ranks.max(torch.tensor(len(differing))))
        again = differing + [filler()] * (most - len(differing))
        for number, batch in enumerate(self._begun(again), start=1):
            fresh = self.policy.score(batch)
            self._backward(batch, fresh, region=region, instead_of=taken_as, is_last=number == most)
        return Computed(statistics=statistics.over_ranks(self.ranks), region=region)

    def _backward(
        self,
        batch: MicroBatch,
        scores: TokenScores,
        *,
        region: StepRegion,
        is_last: bool,
        proximal: TokenScores | None = None,
        instead_of: StepRegion | None = None,
    ) -> LossStatistics:
        """Add the gradient of a micro-batch, less what it was with the region `instead_of`."""
        inputs = self._inputs(batch, scores, proximal=proximal)
        loss, statistics = policy_loss(scores.logprob_N, inputs=inputs, region=region, settings=self.settings)
        if instead_of is not None:
            loss = (
                loss
                - policy_loss(scores.logprob_N, inputs=inputs, region=instead_of, settings=self.settings)[0]
            )
        self.policy.sync_gradients(now=is_last or self.sync_each)
        # FSDP averages gradients over ranks; the step's loss is their sum.
        (loss * self.ranks.size).backward()
        return statistics

    def _region(self, scores: Sequence[TokenScores]) -> StepRegion:
        """The trust region given the scores of the first micro-batches, of every rank."""
        if self.own_loss is not None:
            return self.own_loss
        seen = self.batches[: len(scores)]
        nothing = torch.zeros(0)
        return resolve_region(
            torch.cat([nothing, *(known.logprob_N for known in scores)]),
            anchor_N=torch.cat([nothing, *(batch.behavior_logprob_N for batch in seen)]),
            advantage_N=torch.cat([nothing, *(self.advantage_R[batch.row_N] for batch in seen)]),
            settings=self.settings,
            ranks=self.ranks,
        )

    def _scored(self, batches: Sequence[MicroBatch]) -> list[TokenScores]:
        """Scores under the weights of the step's start, without gradient."""
        with torch.no_grad():
            return [self.policy.score(batch) for batch in self._begun(batches)]

    def _begun(self, batches: Sequence[MicroBatch]) -> Iterator[MicroBatch]:
        for batch in batches:
            self.moved()
            failpoints.hit("trainer.micro_batch")
            yield batch

    def _inputs(self, batch: MicroBatch, scores: TokenScores, *, proximal: TokenScores | None) -> LossInputs:
        reference_N = None
        if self.reference is not None:
            with torch.no_grad():
                reference_N = self.reference.score(batch).logprob_N
        return LossInputs(
            row_N=batch.row_N,
            num_rows=len(self.advantage_R),
            advantage_N=self.advantage_R[batch.row_N],
            weight_N=self.weight_R[batch.row_N] * batch.loss_weight_N,
            behavior_N=batch.behavior_logprob_N,
            proximal_N=None if proximal is None else proximal.logprob_N.detach(),
            reference_N=reference_N,
            entropy_N=scores.entropy_N,
            in_place_N=batch.in_place_N,
        )


def _kept(scores: TokenScores) -> TokenScores:
    """The numbers without what their gradient needs."""
    return TokenScores(logprob_N=scores.logprob_N.detach(), entropy_N=scores.entropy_N.detach())
