"""The same step by our trainer, by a plain loop and by TRL: CPU time of a trained token.

Invariant: the methods take turns on weights, rows and settings that are the same, and the gradients of their first
steps agree. Called by `experiment`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from astraflow_bench.figures import Figure, least_cpu_seconds
from astraflow_bench.trainer.methods import METHODS, OURS, Step, Task, lacking
from astraflow_bench.trainer.sizes import TrainerSizes
from astraflow_bench.trainer.workload import geometric_lengths, model_shape, one_rank, rows_of, same_numbers

_BUDGET = 8192
_COST, _OVER_OURS = "the same step: CPU of a trained token", "the same step: CPU over ours"


def measure_trainers(sizes: TrainerSizes, _folder: Path) -> list[Figure]:
    """CPU time of a trained token by each method, and over ours."""
    one_rank()
    rows = rows_of(geometric_lengths(sizes.rows, median=sizes.median))
    budget = max(_BUDGET, *(row.num_tokens for row in rows))
    task = Task(
        shape=model_shape(sizes), rows=rows, budget=budget, device=torch.device("cpu"), compute="fp32"
    )
    made = {method: make(task) for method, make in METHODS.items() if not lacking(method)}
    norms: dict[str, list[float]] = {method: [] for method in made}
    spent = least_cpu_seconds(
        {method: _noted(step, norms[method]) for method, step in made.items()}, repeats=sizes.turns
    )
    same_numbers([noted[0] for noted in norms.values()], what="the gradient of the first step")
    figures = []
    for method in METHODS:
        if package := lacking(method):
            figures.append(Figure(what=_COST, subject=method, value=None, unit=f"{package} is not installed"))
            continue
        row = partial(Figure, subject=method)
        figures.append(row(what=_COST, value=1e3 * spent[method] / task.num_trained, unit="CPU-ms"))
        if method != OURS:
            figures.append(row(what=_OVER_OURS, value=spent[method] / spent[OURS], unit="×"))
    return figures


def _noted(step: Step, norms: list[float]) -> Callable[[], None]:
    return lambda: norms.append(step())
