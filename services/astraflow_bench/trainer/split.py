"""Where the CPU time of a step goes, from its rows to the copy of its weights that is published.

Invariant: the parts add up to the whole, because each moment belongs to the part that was begun last. Called by
`experiment`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from astraflow.recipe import OptimizerSettings
from astraflow_bench.figures import Figure
from astraflow_bench.trainer.sizes import TrainerSizes
from astraflow_bench.trainer.workload import geometric_lengths, one_rank, rows_of, trained_policy
from astraflow_trainer.model.optimizer import MasterOptimizer
from astraflow_trainer.publish.published import WeightCopies
from astraflow_trainer.step.step import Outcome, StepSettings, train_step

if TYPE_CHECKING:
    import torch

PARTS = (
    "packing, advantages",
    "forward",
    "loss",
    "backward",
    "gradient norm",
    "clipping",
    "AdamW",
    "rounding",
    "copy",
)


class _Parts:
    """CPU time by part."""

    def __init__(self) -> None:
        self.cpu_s: dict[str, float] = defaultdict(float)
        self._part, self._since = "", 0.0

    def begin(self, part: str) -> None:
        """What happens from now on belongs to `part`."""
        now = time.process_time()
        if self._part:
            self.cpu_s[self._part] += now - self._since
        self._part, self._since = part, now


class _Optimizer(MasterOptimizer):
    """Says when the backward passes are over."""

    parts: _Parts

    def gradient_norm(self) -> float:
        """Norm of the gradient."""
        self.parts.begin("gradient norm")
        return super().gradient_norm()

    def step(self, *, gradient_norm: float) -> None:
        """Update."""
        self.parts.begin("clipping")
        super().step(gradient_norm=gradient_norm)
        self.parts.begin("loss")


def measure_split(sizes: TrainerSizes, _folder: Path) -> list[Figure]:
    """CPU-seconds and share of each part of the cheapest of several steps."""
    policy = trained_policy(sizes, one_rank())
    optimizer = _Optimizer(policy, settings=OptimizerSettings())
    rows = rows_of(geometric_lengths(sizes.rows, median=sizes.median))
    copies = WeightCopies(policy)
    found: list[Mapping[str, float]] = []

    def begin(part: str) -> Any:  # noqa: ANN401 - hooks of different signatures
        return lambda *_: optimizer.parts.begin(part)

    def forward_ended(_module: object, _inputs: object, scores: tuple[torch.Tensor, torch.Tensor]) -> None:
        scores[0].register_hook(begin("backward"))
        optimizer.parts.begin("loss")

    hooks = [
        policy.register_forward_pre_hook(begin("forward")),
        policy.register_forward_hook(forward_ended),
        register_optimizer_step_pre_hook(begin("AdamW")),
        register_optimizer_step_post_hook(begin("rounding")),
    ]
    try:
        for _ in range(sizes.turns + 1):
            optimizer.parts = _Parts()
            optimizer.parts.begin(PARTS[0])
            metrics = train_step(policy, optimizer=optimizer, rows=rows, settings=StepSettings())
            assert metrics.outcome is Outcome.COMMITTED, metrics.skip_reason
            optimizer.parts.begin("copy")
            copies.take().published(b"")
            optimizer.parts.begin("")
            found.append(optimizer.parts.cpu_s)
    finally:
        for hook in hooks:
            hook.remove()
    return _figures(min(found[1:], key=lambda cpu_s: sum(cpu_s.values())))


def _figures(cpu_s: Mapping[str, float]) -> list[Figure]:
    whole = sum(cpu_s.values())
    figures = [Figure(what="step", subject="whole", value=whole, unit="CPU-s")]
    for part in PARTS:
        share = 100 * cpu_s[part] / whole
        figures.append(Figure(what="share of a step", subject=part, value=share, unit="%"))
    return figures
