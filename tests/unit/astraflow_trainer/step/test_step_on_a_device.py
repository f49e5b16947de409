"""A whole step on a device that is not the CPU: no tensor of it is made elsewhere, and it learns the same."""

import sys
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn

from astraflow.recipe import OptimizerSettings
from astraflow.recipe.algorithm import AlgorithmSettings
from astraflow_trainer.batches.packing import pack
from astraflow_trainer.model.model import PolicyModel
from astraflow_trainer.model.optimizer import MasterOptimizer
from astraflow_trainer.publish.probing import Prober
from astraflow_trainer.ranks.reductions import OneRank
from astraflow_trainer.step.step import Outcome, StepMetrics, StepSettings, train_step
from support.attention_kernel import piece_by_piece
from support.fake_device import DEVICE, Elsewhere, FakeDevice
from support.tiny_training import MakePolicy, make_rows

KL = {"coefficient": 0.1, "reference": "model"}
ALGORITHMS: list[dict[str, Any]] = [
    {
        "loss": {"kind": "m2po", "budget": 0.1},
        "anchor": "proximal",
        "mismatch": {"reject": {"kind": "kl", "max": 10.0}},
    },
    {"loss": "gspo", "aggregation": "seq_mean_token_mean", "kl": KL},
]


def _put_there(policy: PolicyModel) -> PolicyModel:
    """The model with every parameter and buffer on the device."""
    moved: dict[torch.Tensor, nn.Parameter] = {}
    for module in policy.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not isinstance(parameter, Elsewhere):
                moved.setdefault(parameter, nn.Parameter(Elsewhere(parameter.detach().clone())))
                module._parameters[name] = moved[parameter]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else Elsewhere(buffer)
    policy.device = DEVICE
    return policy


def _step(policy: PolicyModel, reference: PolicyModel, algorithm: dict[str, Any]) -> StepMetrics:
    optimizer = MasterOptimizer(policy, settings=OptimizerSettings(warmup_steps=0))
    settings = StepSettings(algorithm=AlgorithmSettings.model_validate(algorithm), tokens_per_microbatch=64)
    return train_step(policy, optimizer=optimizer, rows=make_rows(), settings=settings, reference=reference)


@pytest.mark.parametrize(("algorithm", "by_pieces"), [(ALGORITHMS[0], True), (ALGORITHMS[1], False)])
def test_a_whole_step_is_taken_there(
    make_policy: MakePolicy, algorithm: dict[str, Any], by_pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # AdamW asks whether torch has a fused kernel for a device of this name.
    monkeypatch.setattr(
        sys.modules["torch.optim.adam"], "_device_dtype_check_for_fused", lambda *_, **__: None
    )
    here, frozen = make_policy(sharded=False), make_policy(sharded=False)
    there, frozen_there = (_put_there(make_policy(sharded=False)) for _ in range(2))
    if by_pieces:
        for policy in (here, there):
            policy.attend_by("reference", piece_by_piece)
    expected = _step(here, frozen, algorithm)
    with FakeDevice() as device:
        found = _step(there, frozen_there, algorithm)
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
    for one, other in zip(here.parameters(), there.parameters(), strict=True):
        assert isinstance(other, Elsewhere)
        # As many bf16 values as a step of AdamW moves: none is further away than that.
        torch.testing.assert_close(other.numbers, one.detach(), atol=1e-4, rtol=2**-7)


def test_what_is_made_elsewhere_is_found(make_policy: MakePolicy) -> None:
    there, (batch, *_) = _put_there(make_policy(sharded=False)), pack(make_rows(), token_budget=64)
    with FakeDevice(), pytest.raises(RuntimeError, match="is given tensors of two devices"):
        there(
            token_ids_BL=there.moved(batch.token_ids_BL),
            position_ids_BL=batch.position_ids_BL,
            attention_mask_B1LL=None,
            source_N=batch.source_N,
            target_N=batch.target_N,
            temperature_N=batch.temperature_N,
        )
