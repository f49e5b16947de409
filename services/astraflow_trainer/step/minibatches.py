"""The updates of a step: which rows each is computed from, packed and weighed.

Invariant: rows of one task stay together, and which update they belong to depends on the tasks of the batch alone, so
any spread over ranks, and a replay, has the same updates. Called by the training step.

Shape legend: R rows of this rank in an update, M their trained tokens, row by row.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from astraflow.recipe.algorithm import Aggregation, KlEstimator
from astraflow_trainer.batches.packing import MicroBatch, filler, pack
from astraflow_trainer.batches.rows import TrainingRow
from astraflow_trainer.ranks.reductions import Ranks
from astraflow_trainer.step.groups import FloatArray
from astraflow_trainer.step.losses import StepCounts, token_weights
from astraflow_trainer.step.losses.kl import kl_estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How rows become micro-batches; as `pack` has it."""

    token_budget: int
    lane_tokens: int | None
    attention_tokens: float

    def micro_batches(self, rows: Sequence[TrainingRow], *, ranks: Ranks) -> list[MicroBatch]:
        """As many on every rank; a collective."""
        batches = pack(
            rows,
            token_budget=self.token_budget,
            lane_tokens=self.lane_tokens,
            attention_tokens=self.attention_tokens,
        )
        most = int(ranks.max(torch.tensor(len(batches))))
        return batches + [filler()] * (most - len(batches))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Minibatch:
    """What this rank computes of one update."""

    rows: Sequence[TrainingRow]
    """R of them."""
    batches: list[MicroBatch]
    advantage_M: torch.Tensor
    """float32."""
    start_R: torch.Tensor
    """int64: where the tokens of each row begin in `advantage_M`."""
    weight_R: torch.Tensor
    """float32: what each token of a row weighs in the update's loss."""
    num_tokens: int
    """Trained tokens of all ranks; at least 1."""
    goals: Sequence[torch.Tensor] = ()
    """float32[M] each, as `advantage_M` lies: what a critic expected at the start of the step, and the returns that it
    learns; none without a critic."""

    def advantage_of(self, batch: MicroBatch) -> torch.Tensor:
        """float32[N]: of the tokens of a micro-batch."""
        return self.of_tokens(self.advantage_M, batch)

    def of_tokens(self, column_M: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """The part [N] of a column that belongs to the tokens of a micro-batch."""
        _, counts = torch.unique_consecutive(batch.row_N, return_counts=True)
        first = counts.cumsum(0) - counts
        place = torch.arange(len(batch.row_N)) - first.repeat_interleave(counts)
        return column_M[self.start_R[batch.row_N] + place]

    def of_rows(self, values: Sequence[torch.Tensor]) -> dict[str, NDArray[np.float32]]:
        """float32[T] by trajectory, of values float32[N] of each micro-batch; NaN where nothing is trained."""
        found: dict[str, NDArray[np.float32]] = {}
        for batch, value_N in zip(self.batches, values, strict=True):
            start = 0
            for place in batch.row_N.unique_consecutive().tolist():
                row = self.rows[place]
                value_T = np.full(row.num_tokens, np.nan, dtype=np.float32)
                value_T[row.loss_mask] = value_N[start : start + row.num_trained_tokens].numpy()
                found[row.trajectory_id] = value_T
                start += row.num_trained_tokens
        return found

    def mismatch_of_rows(self, logprobs: Sequence[torch.Tensor]) -> dict[str, float]:
        """Mean over the tokens of each row of the k3 estimate of KL(engine ‖ trainer), in nats, by trajectory;
        `logprobs` are the trainer's, float32[N] of each micro-batch. Rows without a finite one are left out.
        """
        found: dict[str, float] = {}
        for batch, logprob_N in zip(self.batches, logprobs, strict=True):
            kl_N = kl_estimate(batch.behavior_logprob_N, reference_N=logprob_N, estimator=KlEstimator.K3)
            places, counts = torch.unique_consecutive(batch.row_N, return_counts=True)
            for place, kl in zip(places.tolist(), kl_N.split(counts.tolist()), strict=True):
                if math.isfinite(mean := float(kl.mean())):
                    found[self.rows[place].trajectory_id] = mean
        return found


def minibatches(
    rows: Sequence[TrainingRow],
    advantages: Sequence[FloatArray],
    *,
    goals: Sequence[Sequence[FloatArray]] = (),
    tasks: Sequence[str],
    number: int,
    packing: Packing,
    aggregation: Aggregation,
    ranks: Ranks,
) -> Iterator[Minibatch]:
    """At most `number` of them, of this rank's `rows`; a collective. `tasks` are those of the rows of all ranks,
    `goals` columns for a critic beside the advantages.
    """
    parts = _parts(tasks, number=number)
    for part in parts:
        held = [place for place, row in enumerate(rows) if row.origin.task_id in part]
        yield _minibatch(
            [rows[place] for place in held],
            [[column[place] for place in held] for column in (advantages, *goals)],
            packing=packing,
            aggregation=aggregation,
            ranks=ranks,
        )


def _minibatch(
    rows: Sequence[TrainingRow],
    columns: Sequence[Sequence[FloatArray]],
    *,
    packing: Packing,
    aggregation: Aggregation,
    ranks: Ranks,
) -> Minibatch:
    lengths = torch.tensor([row.num_trained_tokens for row in rows], dtype=torch.int64)
    num_tokens, num_rows = ranks.sum(torch.tensor([int(lengths.sum()), len(rows)])).tolist()
    counts = StepCounts(num_tokens=num_tokens, num_rows=num_rows)
    advantage_M, *goals = [
        torch.from_numpy(np.concatenate([np.zeros(0), *parts])).float() for parts in columns
    ]
    return Minibatch(
        rows=rows,
        batches=packing.micro_batches(rows, ranks=ranks),
        advantage_M=advantage_M,
        start_R=lengths.cumsum(0) - lengths,
        weight_R=token_weights(lengths, counts=counts, aggregation=aggregation).float(),
        num_tokens=num_tokens,
        goals=goals,
    )


def _parts(tasks: Sequence[str], *, number: int) -> list[set[str]]:
    """The tasks, spread evenly in an order that says nothing about them; none is empty."""
    ordered = sorted(set(tasks), key=lambda task: (hashlib.sha256(task.encode()).digest(), task))
    number = min(number, len(ordered))
    borders = [len(ordered) * part // number for part in range(number + 1)] if number else [0]
    return [set(ordered[start:end]) for start, end in pairwise(borders)]
