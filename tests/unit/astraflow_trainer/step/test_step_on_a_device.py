"""A whole step on a device that is not the CPU: no tensor of it is made elsewhere, and it learns the same.

What is prefetched of a next batch has no tensor at all: rows are numpy's, and packed when their step has begun.
"""

import sys
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from astraflow.recipe import LoraSettings, OptimizerSettings
from astraflow.recipe.algorithm import AlgorithmSettings
from astraflow_trainer.batches.packing import pack
from astraflow_trainer.batches.rows import TrainingRow
from astraflow_trainer.model import quantized
from astraflow_trainer.model.lora import adapted
from astraflow_trainer.model.model import CriticModel, PackedModel, PolicyModel, build_causal_lm
from astraflow_trainer.model.optimizer import MasterOptimizer
from astraflow_trainer.publish.probing import Prober
from astraflow_trainer.ranks.reductions import OneRank
from astraflow_trainer.step.critic import Critic
from astraflow_trainer.step.step import Outcome, StepMetrics, StepSettings, train_step
from support.attention_kernel import piece_by_piece
from support.fake_device import DEVICE, Elsewhere, FakeDevice
from support.tiny_training import TINY, MakePolicy, make_rows

KL = {"coefficient": 0.1, "reference": "model"}
TEACHER = {"coefficient": 1.0, "estimator": "k1", "reference": "model", "placement": "advantage"}
LORA = LoraSettings(of="base", rank=2, alpha=4)
NUM_EXPERTS, EACH = 8, 2


@dataclass(frozen=True)
class Case:
    """What is trained how."""

    algorithm: dict[str, Any]
    optimizer: dict[str, Any] = field(default_factory=dict)
    model: str = "dense"
    by_pieces: bool = False


CASES = {
    "M2PO to a proximal anchor, attention by pieces": Case(
        {
            "loss": {"kind": "m2po", "budget": 0.1},
            "anchor": "proximal",
            "mismatch": {"reject": {"kind": "kl", "max": 10.0}},
        },
        by_pieces=True,
    ),
    "a reference": Case({"loss": "gspo", "aggregation": "seq_mean_token_mean", "kl": KL}),
    "distillation": Case({"preset": "opd", "kl": TEACHER}),
    "a critic, several updates": Case(
        {"advantage": "gae", "critic": {}, "loss": "ppo_clip", "epochs": 2, "entropy": {"coefficient": 0.01}}
    ),
    "an average": Case({"loss": "cispo"}, {"average": {}}),
    "8 bits": Case({"loss": "cispo"}, {"kind": "adamw_8bit"}),
    "Muon": Case({"loss": "cispo"}, {"kind": "muon"}),
    "an adapter": Case({"loss": "ppo_clip"}, model="adapter"),
    "router replay": Case({"loss": "ppo_clip"}, model="mixture"),
}


def _policy(make_policy: MakePolicy, kind: str) -> PolicyModel:
    """Equal at each call."""
    if kind == "mixture":
        config = transformers.AutoConfig.for_model(
            "qwen3_moe", vocab_size=32, hidden_size=16, intermediate_size=24, moe_intermediate_size=12,
            num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
            num_experts=NUM_EXPERTS, num_experts_per_tok=EACH, norm_topk_prob=True, decoder_sparse_step=1,
            experts_implementation="eager",
        )  # fmt: skip
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return PolicyModel(model).train()
    policy = make_policy(sharded=False)
    return PolicyModel(adapted(policy.causal_lm, LORA, seed=0)) if kind == "adapter" else policy.train()


def _rows(kind: str) -> list[TrainingRow]:
    """Rows that bring experts to a mixture of them."""
    rows = make_rows(num_rows=8)
    if kind != "mixture":
        return rows
    generator, routed = np.random.default_rng(0), []
    for row in rows:
        chosen = generator.random((row.num_tokens, 2, NUM_EXPERTS)).argsort(-1)[..., :EACH]
        routed.append(replace(row, expert_routing=chosen.astype(np.uint16)))
    return routed


def _put_there(policy: PackedModel) -> None:
    """The model with every parameter and buffer on the device."""
    moved: dict[torch.Tensor, nn.Parameter] = {}
    for module in policy.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not isinstance(parameter, Elsewhere):
                there = Elsewhere(parameter.detach().clone())
                moved.setdefault(parameter, nn.Parameter(there, requires_grad=parameter.requires_grad))
                module._parameters[name] = moved[parameter]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else Elsewhere(buffer)
    policy.device = DEVICE


def _critic(algorithm: AlgorithmSettings, *, there: bool) -> Critic | None:
    if algorithm.critic is None:
        return None
    model = CriticModel(build_causal_lm(TINY, seed=1))
    torch.nn.init.constant_(model.causal_lm.get_output_embeddings().weight, 0.3)
    model.holds_masters = True
    if there:
        _put_there(model)
    optimizer = MasterOptimizer(model, settings=OptimizerSettings(learning_rate=1e-3, warmup_steps=0))
    return Critic(model=model, optimizer=optimizer, settings=algorithm.critic)


def _step(policy: PolicyModel, reference: PolicyModel, case: Case, *, there: bool = False) -> StepMetrics:
    given = OptimizerSettings.model_validate({"warmup_steps": 0, **case.optimizer})
    algorithm = AlgorithmSettings.model_validate(case.algorithm)
    return train_step(
        policy,
        optimizer=MasterOptimizer(policy, settings=given),
        rows=_rows(case.model),
        settings=StepSettings(algorithm=algorithm, tokens_per_microbatch=32),
        reference=reference,
        critic=_critic(algorithm, there=there),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_whole_step_is_taken_there(
    make_policy: MakePolicy, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    quantized._on_device.cache_clear()  # another test may have asked for that device without numbers
    # AdamW asks whether torch has a fused kernel for a device of this name.
    monkeypatch.setattr(
        sys.modules["torch.optim.adam"], "_device_dtype_check_for_fused", lambda *_, **__: None
    )
    here, there = (_policy(make_policy, case.model) for _ in range(2))
    frozen, frozen_there = (make_policy(sharded=False, seed=1).eval() for _ in range(2))
    _put_there(there)
    _put_there(frozen_there)
    if case.by_pieces:
        for policy in (here, there):
            policy.attend_by("reference", piece_by_piece)
    expected = _step(here, frozen, case)
    with FakeDevice() as device:
        found = _step(there, frozen_there, case, there=True)
        answers = Prober(there, ranks=OneRank()).answers()
    assert device.operations > 500
    assert (found.outcome, found.num_micro_batches) == (Outcome.COMMITTED, expected.num_micro_batches)
    assert expected.num_micro_batches > 1
    assert found.loss is not None
    assert expected.loss is not None
    # Attention has another kernel there: sums run in another order.
    assert asdict(found.loss) == pytest.approx(asdict(expected.loss), rel=1e-4, abs=1e-5)
    assert found.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-5)
    assert answers is not None
    assert found.of_critic == pytest.approx(expected.of_critic, rel=1e-4, abs=1e-5)
    for one, other in zip(here.parameters(), there.parameters(), strict=True):
        assert isinstance(other, Elsewhere)
        # As many bf16 values as a step of AdamW moves: none is further away than that.
        torch.testing.assert_close(other.numbers, one.detach(), atol=1e-4, rtol=2**-7)


def test_what_is_made_elsewhere_is_found(make_policy: MakePolicy) -> None:
    there, (batch, *_) = make_policy(sharded=False), pack(make_rows(), token_budget=64)
    _put_there(there)
    with FakeDevice(), pytest.raises(RuntimeError, match="is given tensors of two devices"):
        there(
            token_ids_BL=there.moved(batch.token_ids_BL),
            position_ids_BL=batch.position_ids_BL,
            attention_mask_B1LL=None,
            source_N=batch.source_N,
            target_N=batch.target_N,
            temperature_N=batch.temperature_N,
        )
