"""The critic of advantage `gae`: what it expects at the start of a step, and its updates.

Invariant: value loss and gradient depend on rows and settings only, not on packing, micro-batching or the number of
ranks; an update that is not finite leaves the critic as it was. Its forward passes are collectives, which all ranks run
in the same order. Called by the training step, before the policy's update.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from astraflow.recipe.advantage import CriticSettings
from astraflow.recipe.algorithm import AlgorithmSettings
from astraflow_trainer.batches.packing import MicroBatch
from astraflow_trainer.model.model import CriticModel
from astraflow_trainer.model.optimizer import MasterOptimizer
from astraflow_trainer.ranks.reductions import Ranks
from astraflow_trainer.step.groups import FloatArray
from astraflow_trainer.step.minibatches import Minibatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Critic:
    """A critic that is trained."""

    model: CriticModel
    optimizer: MasterOptimizer
    settings: CriticSettings

    def is_alone(self, algorithm: AlgorithmSettings) -> bool:
        """Whether the policy waits for it in the next step."""
        return self.optimizer.num_steps < self.settings.warmup * algorithm.minibatches * algorithm.epochs

    def expected(self, batches: Sequence[MicroBatch], *, num_tokens: Sequence[int]) -> list[FloatArray]:
        """float64[T] of each row: its trained tokens' values, without gradient; a collective. `num_tokens` are those of
        each row in `batches`.
        """
        found = [np.zeros(count) for count in num_tokens]
        for batch in batches:
            with torch.no_grad():
                value_N = self.model.values(batch).double()
            rows, counts = torch.unique_consecutive(batch.row_N, return_counts=True)
            for row, part in zip(rows.tolist(), value_N.split(counts.tolist()), strict=True):
                found[row] = part.numpy()
        self.model.gathered_no_more()
        return found

    def update(
        self, minibatch: Minibatch, *, ranks: Ranks, sync_each: bool, moved: Callable[[], None]
    ) -> "CriticUpdate":
        """Take one step on a minibatch, or none where it is not finite; a collective."""
        total = torch.zeros((), dtype=torch.float64)
        for number, batch in enumerate(minibatch.batches):
            moved()
            loss = self._loss(batch, minibatch)
            self.model.sync_gradients(now=sync_each or number == len(minibatch.batches) - 1)
            # FSDP averages gradients over ranks; the step's loss is their sum.
            (loss * ranks.size).backward()
            total += loss.detach().double()
        value_loss, norm = float(ranks.sum(total)), self.optimizer.gradient_norm()
        if math.isfinite(value_loss) and math.isfinite(norm):
            self.optimizer.step(gradient_norm=norm)
        else:
            self.optimizer.discard()
        return CriticUpdate(value_loss, norm)

    def _loss(self, batch: MicroBatch, minibatch: Minibatch) -> torch.Tensor:
        value_N = self.model.values(batch)
        before_N, return_N = (minibatch.of_tokens(column, batch) for column in minibatch.goals)
        squared_N = (value_N - return_N).square()
        if self.settings.clip is not None:
            near_N = before_N + (value_N - before_N).clamp(-self.settings.clip, self.settings.clip)
            squared_N = torch.maximum(squared_N, (near_N - return_N).square())
        return 0.5 * (squared_N * batch.loss_weight_N).sum() / minibatch.num_tokens


@dataclass(frozen=True, slots=True)
class CriticUpdate:
    """What one update of a critic found."""

    value_loss: float
    gradient_norm: float


def critic_metrics(updates: Sequence[CriticUpdate]) -> dict[str, float]:
    """Means over the updates of a step, by the names of their curves; none where nothing was computed."""
    if not updates:
        return {}
    number = len(updates)
    return {
        "value_loss": sum(update.value_loss for update in updates) / number,
        "critic_grad_norm": sum(update.gradient_norm for update in updates) / number,
    }


def fit_metrics(
    expected: Sequence[FloatArray], returns: Sequence[FloatArray], *, ranks: Ranks
) -> dict[str, float]:
    """How well the values at the start of the step foretold the returns, over the tokens of all ranks; a collective.

    `explained_variance` is 1 − Var(R − V) / Var(R): 1 is perfect, 0 no better than a constant; 0 where all returns are
    equal.
    """
    nothing = [np.zeros(0)]
    return_M, value_M = (
        ranks.gather(torch.from_numpy(np.concatenate([*nothing, *parts]))).numpy()
        for parts in (returns, expected)
    )
    if not len(return_M):
        return {}
    spread = float(return_M.var())
    explained = 1.0 - float((return_M - value_M).var()) / spread if spread > 0 else 0.0
    return {
        "explained_variance": explained,
        "value_mean": float(value_M.mean()),
        "return_mean": float(return_M.mean()),
    }
