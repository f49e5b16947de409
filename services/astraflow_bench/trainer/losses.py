"""M2PO, whose bounds need the whole step, beside PPO's clip, which looks at each token alone.

Invariant: both train the same model on the same rows, in turns. Called by `experiment`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from astraflow.recipe.algorithm import AlgorithmSettings, M2po, PpoClip
from astraflow_bench.figures import Figure, least_cpu_seconds
from astraflow_bench.trainer.sizes import TrainerSizes
from astraflow_bench.trainer.workload import (
    geometric_lengths,
    one_rank,
    optimizer_of,
    rows_of,
    trained_policy,
)
from astraflow_trainer.batches.packing import pack
from astraflow_trainer.batches.rows import TrainingRow
from astraflow_trainer.model.model import PolicyModel
from astraflow_trainer.model.optimizer import MasterOptimizer
from astraflow_trainer.step.step import Outcome, StepSettings, train_step

_MOST_OVER_PPO = 1.05
_PARTS = 5
_NEAR, _FAR = 0.1, 0.4
"""Standard deviation of the trainer's log-probs from the engine's, nats: a few versions of staleness; bounds cut."""


def measure_losses(sizes: TrainerSizes, _folder: Path) -> list[Figure]:
    """A step of either loss, in one micro-batch and in several; in several also where M2PO's bounds cut."""
    policy = trained_policy(sizes, one_rank())
    optimizer = optimizer_of(policy)
    lengths = geometric_lengths(sizes.rows, median=sizes.median)
    whole, parts = 4 * sum(lengths), max(*lengths, sum(lengths) // _PARTS)
    figures = []
    for budget, deviation in ((whole, _NEAR), (parts, _NEAR), (parts, _FAR)):
        rows = _sampled(rows_of(lengths), policy, deviation=deviation)
        figures += _figures(policy, optimizer, rows, budget=budget, turns=sizes.turns, deviation=deviation)
    return figures


@torch.no_grad()
def _sampled(rows: Sequence[TrainingRow], policy: PolicyModel, *, deviation: float) -> list[TrainingRow]:
    """The rows with log-probs of an engine whose weights are near: what the model says, and noise."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for row in rows:
        (alone,) = pack([row], token_budget=row.num_tokens)
        said = policy.score(alone).logprob_N
        behavior = row.behavior_logprobs.copy()
        behavior[row.loss_mask] = said + deviation * torch.randn(said.shape, generator=generator)
        found.append(replace(row, behavior_logprobs=behavior))
    return found


def _figures(
    policy: PolicyModel,
    optimizer: MasterOptimizer,
    rows: Sequence[TrainingRow],
    *,
    budget: int,
    turns: int,
    deviation: float,
) -> list[Figure]:
    def step(loss: M2po | PpoClip) -> Callable[[], None]:
        settings = StepSettings(
            algorithm=AlgorithmSettings(loss=loss), tokens_per_microbatch=budget, lane_tokens=lane_tokens
        )

        def run() -> None:
            metrics = train_step(policy, optimizer=optimizer, rows=rows, settings=settings)
            assert metrics.outcome is Outcome.COMMITTED, metrics.skip_reason

        return run

    lane_tokens = max(row.num_tokens for row in rows)
    count = len(pack(rows, token_budget=budget, lane_tokens=lane_tokens))
    subject = f"{count} micro-batch{'es' if count > 1 else ''}, log-probs off by {deviation:g}"
    limit = _MOST_OVER_PPO if deviation == _NEAR else None
    spent = least_cpu_seconds({"M2PO": step(M2po()), "PPO": step(PpoClip())}, repeats=turns)
    row = partial(Figure, subject=subject)
    ratio = spent["M2PO"] / spent["PPO"]
    return [
        *(row(what=f"step with {loss}", value=cpu_s, unit="CPU-s") for loss, cpu_s in spent.items()),
        row(what="step with M2PO over PPO", value=ratio, unit="×", most=limit),
    ]
