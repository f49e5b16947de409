"""The passes of an update: forward and backward over all micro-batches, which leave the gradient on the parameters.

Invariant: loss and gradient are those of the whole update with one trust region, whatever the micro-batches. A region
whose bounds depend on all tokens is known after the last forward pass only. As a rule it then cuts nothing, so each
micro-batch is taken as if it did not, and where the bounds turn out to cut tokens, the micro-batches that hold them are
computed once more, with the difference as their loss: gradients add. Called by the training step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

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
from astraflow_trainer.step.minibatches import Minibatch
from astraflow_trainer.step.plugins import PluginLoss


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Computed:
    """What forward and backward left behind, besides the gradient."""

    statistics: LossStatistics
    """Over all ranks."""
    region: StepRegion
    logprobs: Sequence[torch.Tensor]
    """float32[N] of each micro-batch: under the weights that the step, or else this update, began with."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Passes:
    """What this rank computes of an update."""

    policy: PolicyModel
    minibatch: Minibatch
    starts: Sequence[torch.Tensor] | None
    """float32[N] of each micro-batch: log-probs at the start of the step, where that was before this update."""
    settings: AlgorithmSettings
    own_loss: PluginLoss | None
    ranks: Ranks
    reference: PolicyModel | None
    moved: Callable[[], None]
    """Called whenever a micro-batch is begun."""
    sync_each: bool
    """Whether ranks add up the gradient of each micro-batch, or once that of all."""

    @property
    def batches(self) -> Sequence[MicroBatch]:
        """As many on every rank."""
        return self.minibatch.batches

    def compute(self) -> Computed:
        """Run them; a collective."""
        if len(self.batches) == 1:
            return self._in_one()
        if isinstance(self.settings.anchor, ProximalAnchor) and self.starts is None:
            return replace(self, starts=self.log_probs()).compute()
        if self.settings.needs_step_bounds:
            return self._with_step_bounds()
        return self._with(self._region([]))

    def log_probs(self) -> list[torch.Tensor]:
        """float32[N] of each micro-batch, under the weights as they are, without gradient."""
        return [known.logprob_N for known in self._scored(self.batches)]

    def _in_one(self) -> Computed:
        """With a single micro-batch on every rank its scores serve for everything."""
        (batch,) = self._begun(self.batches)
        scores = self.policy.score(batch)
        region = self._region([scores])
        statistics = self._backward(0, scores, region=region, is_last=True)
        return self._computed(statistics, region, logprobs=[scores.logprob_N.detach()])

    def _with(self, region: StepRegion) -> Computed:
        """Forward and backward under a region that is known."""
        statistics, logprobs = LossStatistics.empty(), list[torch.Tensor]()
        for number, batch in enumerate(self._begun(self.batches)):
            scores, is_last = self.policy.score(batch), number == len(self.batches) - 1
            statistics += self._backward(number, scores, region=region, is_last=is_last)
            logprobs.append(scores.logprob_N.detach())
        return self._computed(statistics, region, logprobs=logprobs)

    def _computed(
        self, statistics: LossStatistics, region: StepRegion, *, logprobs: Sequence[torch.Tensor]
    ) -> Computed:
        return Computed(
            statistics=statistics.over_ranks(self.ranks),
            region=region,
            logprobs=logprobs if self.starts is None else self.starts,
        )

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
        self._backward(0, scores[0], region=lax, is_last=False)
        scores = [_kept(scores[0])]
        for number, batch in enumerate(others, start=1):
            scores.append(self.policy.score(batch))
            self._backward(number, scores[-1], region=lax, is_last=number == len(self.batches) - 1)
            scores[-1] = _kept(scores[-1])
        region = self._region(scores)
        return self._corrected(scores, taken_as=lax, region=region)

    def _corrected(
        self, scores: Sequence[TokenScores], *, taken_as: StepRegion, region: StepRegion
    ) -> Computed:
        """Add to the gradient what `region` makes of the micro-batches that it cuts otherwise than `taken_as`."""
        statistics, differing = LossStatistics.empty(), list[int]()
        for number, known in enumerate(scores):
            inputs = self._inputs(number, known)
            statistics += policy_loss(known.logprob_N, inputs=inputs, region=region, settings=self.settings)[
                1
            ]
            if not cuts_alike(
                taken_as, region, logprob_N=known.logprob_N, inputs=inputs, settings=self.settings
            ):
                differing.append(number)
        most = int(self.ranks.max(torch.tensor(len(differing))))
        again = [self.batches[number] for number in differing] + [filler()] * (most - len(differing))
        for place, batch in enumerate(self._begun(again)):
            which = differing[place] if place < len(differing) else None
            fresh = self.policy.score(batch)
            self._backward(which, fresh, region=region, instead_of=taken_as, is_last=place == most - 1)
        return self._computed(statistics, region, logprobs=[known.logprob_N for known in scores])

    def _backward(
        self,
        number: int | None,
        scores: TokenScores,
        *,
        region: StepRegion,
        is_last: bool,
        instead_of: StepRegion | None = None,
    ) -> LossStatistics:
        """Add the gradient of a micro-batch, None for a filler, less what it was with the region `instead_of`."""
        inputs = self._inputs(number, scores)
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
            anchor_N=torch.cat(
                [nothing, *(self._anchor(number, known) for number, known in enumerate(scores))]
            ),
            advantage_N=torch.cat([nothing, *(self.minibatch.advantage_of(batch) for batch in seen)]),
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

    def _inputs(self, number: int | None, scores: TokenScores) -> LossInputs:
        batch = filler() if number is None else self.batches[number]
        reference_N = None
        if self.reference is not None:
            with torch.no_grad():
                reference_N = self.reference.score(batch).logprob_N
        is_proximal = isinstance(self.settings.anchor, ProximalAnchor)
        return LossInputs(
            row_N=batch.row_N,
            num_rows=len(self.minibatch.weight_R),
            advantage_N=self.minibatch.advantage_of(batch),
            weight_N=self.minibatch.weight_R[batch.row_N] * batch.loss_weight_N,
            behavior_N=batch.behavior_logprob_N,
            proximal_N=self._start(number, scores) if is_proximal else None,
            reference_N=reference_N,
            entropy_N=scores.entropy_N,
            in_place_N=batch.in_place_N,
        )

    def _anchor(self, number: int, scores: TokenScores) -> torch.Tensor:
        """What second-moment bounds measure the distance from."""
        if isinstance(self.settings.anchor, ProximalAnchor):
            return self._start(number, scores)
        return self.batches[number].behavior_logprob_N

    def _start(self, number: int | None, scores: TokenScores) -> torch.Tensor:
        """Log-probs at the start of the step; where nothing was updated since, the scores themselves."""
        if self.starts is None or number is None:
            return scores.logprob_N.detach()
        return self.starts[number]


def _kept(scores: TokenScores) -> TokenScores:
    """The numbers without what their gradient needs."""
    return TokenScores(logprob_N=scores.logprob_N.detach(), entropy_N=scores.entropy_N.detach())
