"""Packed rows beside padded ones and beside a pass for each row.

Invariant: all methods compute the same gradient of the same rows on the same model, not sharded, and take turns.
Called by `experiment`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from astraflow_bench.figures import Figure, least_cpu_seconds
from astraflow_bench.trainer.sizes import TrainerSizes
from astraflow_bench.trainer.workload import (
    geometric_lengths,
    model_shape,
    num_parameters,
    outlier_lengths,
    rows_of,
    same_numbers,
)
from astraflow_trainer.batches.packing import MicroBatch, micro_batch, pack
from astraflow_trainer.batches.rows import TrainingRow
from astraflow_trainer.model.model import PolicyModel, build_causal_lm

_BUDGET = 8192
_LEAST_OVER_PADDED = 1.8
_LEAST_OVER_SEPARATE = 1.0


def measure_packing(sizes: TrainerSizes, _folder: Path) -> list[Figure]:
    """Tokens a CPU-second of each way, for geometric lengths and for one long row beside short ones."""
    policy = PolicyModel(build_causal_lm(model_shape(sizes), seed=0)).train()
    geometric = geometric_lengths(sizes.rows, median=sizes.median)
    middle, long = np.quantile(geometric, (0.5, 0.99), method="higher")
    million = 1e-6 * num_parameters(policy)
    outlier = outlier_lengths(sizes.rows, median=sizes.median, outlier=sizes.outlier)
    return [
        Figure(what="model", subject="packing, losses, ranks, split", value=million, unit="M parameters"),
        Figure(
            what="geometric lengths: p99 over p50",
            subject=f"{sizes.rows} rows",
            value=long / middle,
            unit="×",
        ),
        *_figures("geometric lengths", geometric, policy, sizes, over_padded=_LEAST_OVER_PADDED),
        *_figures("one long row", outlier, policy, sizes, over_separate=_LEAST_OVER_SEPARATE),
    ]


def _figures(
    what: str,
    lengths: Sequence[int],
    policy: PolicyModel,
    sizes: TrainerSizes,
    *,
    over_padded: float | None = None,
    over_separate: float | None = None,
) -> list[Figure]:
    rows = rows_of(lengths)
    batches = {
        "packed": pack(rows, token_budget=max(_BUDGET, *lengths), attention_tokens=policy.attention_tokens),
        "padded": _padded(rows),
        "separate passes": [micro_batch(rows, lanes=[[index]]) for index in range(len(rows))],
    }
    norms: list[float] = []
    runs = {way: partial(_compute_gradient, policy, held, norms) for way, held in batches.items()}
    spent = least_cpu_seconds(runs, repeats=sizes.turns)
    same_numbers(norms, what="the gradient")
    figures = []
    for way, held in batches.items():
        row = partial(Figure, subject=way)
        positions = sum(batch.token_ids_BL.numel() for batch in held) / sum(lengths)
        figures += [
            row(what=f"{what}: rate", value=sum(lengths) / spent[way], unit="tokens/CPU-s"),
            row(what=f"{what}: positions computed", value=positions, unit="a token"),
            row(what=f"{what}: passes", value=len(held), unit=""),
        ]
    ratio = partial(Figure, subject="packed", unit="×")
    packed = spent["packed"]
    return [
        *figures,
        ratio(what=f"{what}: rate over padded", value=spent["padded"] / packed, least=over_padded),
        ratio(
            what=f"{what}: rate over separate passes",
            value=spent["separate passes"] / packed,
            least=over_separate,
        ),
    ]


def _padded(rows: Sequence[TrainingRow]) -> list[MicroBatch]:
    """What a data collator makes: rows as they come, so many that the longest of all would fit the budget, each padded
    to the longest beside it.
    """
    at_once = max(1, _BUDGET // max(row.num_tokens for row in rows))
    places = range(len(rows))
    chunks = [places[first : first + at_once] for first in range(0, len(rows), at_once)]
    return [micro_batch(rows, lanes=[[index] for index in chunk]) for chunk in chunks]


def _compute_gradient(policy: PolicyModel, batches: Sequence[MicroBatch], norms: list[float]) -> None:
    """Forward and backward of all; the norm of the gradient is appended to `norms`."""
    for batch in batches:
        policy.score(batch).logprob_N.sum().backward()
    gradients = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
    norms.append(float(torch.nn.utils.get_total_norm(gradients)))
    policy.zero_grad(set_to_none=True)
