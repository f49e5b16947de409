"""Value and gradient of every loss are those of the batch: whatever its micro-batches, order, ranks, recomputation."""

from dataclasses import dataclass, field, replace
from typing import Any, cast, get_args

import numpy as np
import pytest
import torch

from astraflow.recipe.algorithm import AlgorithmSettings, LossSettings
from astraflow.recipe.section import kind_of
from astraflow_trainer.batches.rank_batches import balanced_shares
from astraflow_trainer.batches.rows import TrainingRow
from astraflow_trainer.model.model import PolicyModel, local_part
from astraflow_trainer.model.optimizer import MasterOptimizer
from astraflow_trainer.model.sharding import Placement
from astraflow_trainer.ranks.reductions import OneRank, Ranks
from astraflow_trainer.step.step import StepSettings, train_step
from support.rank_threads import run_ranks
from support.tiny_training import MakePolicy, make_rows

pytestmark = pytest.mark.slow

BUDGETS = {
    "m2po": {"budget": 0.1, "floor_low": 0.0, "floor_high": 0.0},
    "m2po_clip": {"budget": 0.1},
    "m2po_mask": {"budget": 0.1},
    "gspo": {"low": 0.1, "high": 0.1},
}
KL = {"coefficient": 0.2, "estimator": "k1", "reference": "model"}
ALGORITHMS: dict[str, dict[str, Any]] = {
    **{
        (name := str(kind_of(member))): {"loss": {"kind": name, **BUDGETS.get(name, {})}}
        for member in get_args(LossSettings)
    },
    "bypass, sequence weights, vetoed": {
        "loss": "none",
        "anchor": "bypass",
        "mismatch": {"weight": {"kind": "mis", "cap": 50.0}, "veto": {"low": 0.05}},
    },
    "proximal, rejected rows, row means": {
        "loss": "ppo_clip",
        "anchor": "proximal",
        "minibatches": 2,
        "mismatch": {"weight": "icepop", "reject": {"kind": "kl", "max": 0.5}},
        "aggregation": "seq_mean_token_mean",
    },
    "entropy and a KL term": {"entropy": {"coefficient": 0.1}, "kl": KL | {"estimator": "k3_k2"}},
    "reinforce++": {"preset": "reinforce_pp", "kl": KL | {"placement": "reward"}, "minibatches": 2},
    "reinforce++ with baseline": {"advantage": {"kind": "reinforce_pp_baseline", "discount": 0.9}},
    "distillation": {"preset": "opd", "kl": KL, "minibatches": 2},
    "sums, opo": {"advantage": "opo", "aggregation": "token_sum"},
    "constant, maxrl": {"advantage": "maxrl", "aggregation": {"kind": "constant", "length": 9}},
}


@dataclass
class Gradients:
    """Stands in for an optimizer: keeps the gradient of each update, and leaves the weights alone."""

    policy: PolicyModel
    learning_rate: float = 0.0
    kept: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def gradient_norm(self) -> float:
        """Finite."""
        return 1.0

    def step(self, *, gradient_norm: float) -> None:
        """Take it."""
        assert gradient_norm == 1.0
        found = {name: of.grad for name, of in self.policy.hf_parameters()}
        self.kept.append({name: local_part(of).clone() for name, of in found.items() if of is not None})
        self.policy.zero_grad()


def _taken(
    policy: PolicyModel,
    rows: list[TrainingRow],
    settings: StepSettings,
    *,
    reference: PolicyModel,
    ranks: Ranks | None = None,
) -> tuple[float, list[dict[str, torch.Tensor]]]:
    """Loss, and the gradient of each update on this rank."""
    optimizer = Gradients(policy)
    metrics = train_step(
        policy,
        optimizer=cast("MasterOptimizer", optimizer),
        rows=rows,
        settings=settings,
        ranks=ranks or OneRank(),
        reference=reference,
    )
    assert metrics.loss is not None
    return metrics.loss.loss, optimizer.kept


def _in_ranks(
    size: int, make_policy: MakePolicy, rows: list[TrainingRow], settings: StepSettings
) -> tuple[float, list[dict[str, torch.Tensor]]]:
    """Of ranks with a copy of the model each: FSDP would hand each the mean of their gradients."""
    models = [[make_policy(seed=seed, sharded=False) for seed in (0, 5)] for _ in range(size)]
    shares = balanced_shares([row.num_tokens for row in rows], num_ranks=size)

    def work(ranks: Any) -> tuple[float, list[dict[str, torch.Tensor]]]:
        share = [rows[place] for place in shares[ranks.index]]
        policy, reference = models[ranks.index]
        return _taken(policy, share, settings, reference=reference, ranks=ranks)

    found = run_ranks(size, work)
    means = [
        {name: torch.stack([part[name] for part in parts]).mean(0) for name in parts[0]}
        for parts in zip(*(kept for _, kept in found), strict=True)
    ]
    assert len({loss for loss, _ in found}) == 1
    return found[0][0], means


@pytest.mark.parametrize("name", ALGORITHMS)
def test_nothing_but_the_batch_decides(name: str, make_policy: MakePolicy) -> None:
    algorithm = AlgorithmSettings.model_validate(ALGORITHMS[name])
    algorithm.require_consistent()
    rows = make_rows(num_rows=16)
    shuffled = [rows[index] for index in np.random.default_rng(1).permutation(16)]
    whole = StepSettings(algorithm=algorithm, tokens_per_microbatch=1000)
    reference = make_policy(seed=5, sharded=False)
    loss, gradients = _taken(make_policy(sharded=False), rows, whole, reference=reference)
    assert len(gradients) == algorithm.minibatches
    scale = max(float(value.abs().max()) for gradient in gradients for value in gradient.values())
    assert scale > 0
    small, tiny = replace(whole, tokens_per_microbatch=40), replace(whole, tokens_per_microbatch=14)
    recomputed = make_policy(placement=Placement(recompute="full"))
    others = {
        "micro-batches": _taken(make_policy(sharded=False), rows, small, reference=reference),
        "order": _taken(make_policy(sharded=False), shuffled, tiny, reference=reference),
        "recomputation": _taken(recomputed, rows, small, reference=reference),
        "two ranks": _in_ranks(2, make_policy, rows, small),
        "four ranks": _in_ranks(4, make_policy, shuffled, tiny),
    }
    for what, (other, found) in others.items():
        assert other == pytest.approx(loss, rel=2e-5, abs=1e-6), what
        for one, two in zip(gradients, found, strict=True):
            torch.testing.assert_close(two, one, rtol=1e-4, atol=3e-6 * max(1.0, scale), msg=what)
