"""The loss kernel against TRL's GRPO trainer: the same numbers in, the same loss and gradient out, in float64."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from astraflow.recipe.algorithm import AlgorithmSettings
from astraflow_trainer.ranks.reductions import OneRank
from astraflow_trainer.step.losses import LossInputs, StepCounts, policy_loss, resolve_region, token_weights

trl = pytest.importorskip("trl.trainer.grpo_trainer", reason="trl, of the extra `test`, is not installed")
pytestmark = pytest.mark.slow

LENGTHS = [7, 3, 5, 1]
ADVANTAGES = [1.2, -0.7, 0.4, -1.5]
LONGEST = max(LENGTHS)
MASK = torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]
OFF = {"weight": "none"}
PROXIMAL = {"anchor": "proximal", "mismatch": OFF}
PPO = {"kind": "ppo_clip", "low": 0.2, "high": 0.28}
OWN = {"kind": "ppo_clip", "low": 0.1, "high": 0.1}
ROW_MEANS = {"aggregation": "seq_mean_token_mean"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo with a KL term": (
        {"loss_type": "grpo", "epsilon": (0.2, 0.28), "beta": 0.04},
        {**PROXIMAL, **ROW_MEANS, "loss": PPO, "kl": {"coefficient": 0.04, "reference": "model"}},
    ),
    "grpo with other bounds": (
        {"loss_type": "grpo", "epsilon": (0.1, 0.1)},
        {**PROXIMAL, **ROW_MEANS, "loss": OWN},
    ),
    "dapo": ({"loss_type": "dapo", "epsilon": (0.2, 0.28)}, {**PROXIMAL, "loss": PPO}),
    "bnpo": ({"loss_type": "bnpo", "epsilon": (0.2, 0.28)}, {**PROXIMAL, "loss": PPO}),
    "dr_grpo": (
        {"loss_type": "dr_grpo", "epsilon": (0.2, 0.28)},
        {**PROXIMAL, "loss": PPO, "aggregation": {"kind": "constant", "length": LONGEST}},
    ),
    "gspo": (
        {"loss_type": "grpo", "epsilon": (3e-4, 4e-4), "importance_sampling_level": "sequence"},
        {**PROXIMAL, **ROW_MEANS, "loss": "gspo"},
    ),
    "cispo": ({"loss_type": "cispo", "epsilon": (0.2, 5.0)}, {**PROXIMAL, "loss": "cispo"}),
    "sapo": ({"loss_type": "sapo", "epsilon": (0.2, 0.28)}, {**PROXIMAL, **ROW_MEANS, "loss": "sapo"}),
    "token_truncate": (
        {"loss_type": "dapo", "epsilon": (0.2, 0.28), "vllm_mode": "token_truncate"},
        {**PROXIMAL, "loss": PPO, "mismatch": {"weight": {"kind": "tis", "cap": 1.2}}},
    ),
    "token_mask": (
        {"loss_type": "dapo", "epsilon": (0.2, 0.28), "vllm_mode": "token_mask"},
        {**PROXIMAL, "loss": PPO, "mismatch": {"weight": {"kind": "mis", "level": "token", "cap": 1.2}}},
    ),
    "sequence_mask": (
        {"loss_type": "dapo", "epsilon": (0.2, 0.28), "vllm_mode": "sequence_mask"},
        {**PROXIMAL, "loss": PPO, "mismatch": {"weight": {"kind": "mis", "cap": 1.2}}},
    ),
    "sequence_truncate": (
        {"loss_type": "dapo", "epsilon": (0.2, 0.28), "vllm_mode": "sequence_truncate"},
        {**PROXIMAL, "loss": PPO, "mismatch": {"weight": {"kind": "tis", "level": "sequence", "cap": 1.2}}},
    ),
}


def _scores() -> dict[str, torch.Tensor]:
    """Log-probs float64[rows, longest] of policy, start of the step, sampler and reference."""
    generator = torch.Generator().manual_seed(3)
    shape, kind = (len(LENGTHS), LONGEST), {"generator": generator, "dtype": torch.float64}
    start = -3 * torch.rand(shape, **kind) - 0.1  # type: ignore[call-overload]
    near = {name: start + 0.3 * torch.randn(shape, **kind) for name in ("policy", "sampler", "reference")}  # type: ignore[call-overload]
    return {"start": start, **near}


def _of_trl(options: dict[str, Any]) -> tuple[float, torch.Tensor]:
    """Value and gradient float64[N] of `GRPOTrainer._compute_loss`, given log-probs instead of a model."""
    scores = _scores()
    policy = scores["policy"].requires_grad_()
    ones, mode = torch.ones_like(policy), options.get("vllm_mode")
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (policy, ones, None),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        args=SimpleNamespace(
            use_bias_correction_kl=False,
            delta=None,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=1,
        ),
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        _entropy_bonus_enabled=False,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=options.get("importance_sampling_level", "token"),
        beta=options.get("beta", 0.0),
        loss_type=options["loss_type"],
        epsilon_low=options["epsilon"][0],
        epsilon_high=options["epsilon"][1],
        use_vllm=mode is not None,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        max_completion_length=LONGEST,
    )
    inputs = {
        "prompt_ids": torch.zeros(len(LENGTHS), 0, dtype=torch.int64),
        "prompt_mask": torch.zeros(len(LENGTHS), 0, dtype=torch.int64),
        "completion_ids": torch.zeros(len(LENGTHS), LONGEST, dtype=torch.int64),
        "completion_mask": MASK.long(),
        "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64),
        "old_per_token_logps": scores["start"],
        "ref_per_token_logps": scores["reference"],
        "num_items_in_batch": MASK.sum(),
    }
    if mode is not None:
        difference = (scores["start"] - scores["sampler"]) * MASK
        by_row = mode.startswith("sequence")
        ratio = (difference.sum(-1, keepdim=True) if by_row else difference).exp()
        truncate = mode.endswith("truncate")
        inputs["importance_sampling_ratio"] = ratio.clamp(max=1.2) if truncate else ratio * (ratio <= 1.2)
    loss = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    assert policy.grad is not None
    return float(loss.detach()), policy.grad[MASK]


def _of_ours(given: dict[str, Any]) -> tuple[float, torch.Tensor]:
    settings = AlgorithmSettings.model_validate(given)
    scores = {name: values.detach()[MASK] for name, values in _scores().items()}
    policy = scores["policy"].requires_grad_()
    rows = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)[rows]
    counts = StepCounts(num_tokens=sum(LENGTHS), num_rows=len(LENGTHS))
    weights = token_weights(torch.tensor(LENGTHS), counts=counts, aggregation=settings.aggregation)
    region = resolve_region(
        policy, anchor_N=scores["start"], advantage_N=advantages, settings=settings, ranks=OneRank()
    )
    inputs = LossInputs(
        row_N=rows,
        num_rows=len(LENGTHS),
        advantage_N=advantages,
        weight_N=weights[rows],
        behavior_N=scores["sampler"],
        proximal_N=scores["start"],
        reference_N=scores["reference"],
    )
    loss, _ = policy_loss(policy, inputs=inputs, region=region, settings=settings)
    loss.backward()
    assert policy.grad is not None
    return float(loss.detach()), policy.grad


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_trl(name: str) -> None:
    options, given = CASES[name]
    (theirs, their_gradient), (ours, our_gradient) = _of_trl(options), _of_ours(given)
    # TRL rounds SAPO's τ of 1.05 to float32.
    exact = name != "sapo"
    assert ours == pytest.approx(theirs, rel=1e-13 if exact else 1e-6)
    torch.testing.assert_close(
        our_gradient, their_gradient, rtol=1e-12 if exact else 1e-6, atol=1e-15 if exact else 1e-8
    )
