"""Masters, rounding, schedule, clipping and discarding."""

import math
from typing import Any

import pytest
import torch

from astraflow.recipe import OptimizerSettings
from astraflow_trainer.batches.packing import pack
from astraflow_trainer.model.model import PolicyModel, local_part
from astraflow_trainer.model.optimizer import MasterOptimizer, ScheduleSettings
from astraflow_trainer.model.sharding import Compute, Placement
from support.tiny_training import MakePolicy, copies, make_rows, same_bits


def _optimizer(policy: PolicyModel, **settings: Any) -> MasterOptimizer:
    return MasterOptimizer(policy, settings=OptimizerSettings.model_validate(settings))


def _backward(policy: PolicyModel) -> None:
    for batch in pack(make_rows(), token_budget=500):
        policy.score(batch).logprob_N.sum().backward()


def _step(optimizer: MasterOptimizer) -> None:
    optimizer.step(gradient_norm=optimizer.gradient_norm())


def _rounded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(torch.bfloat16).float() for name, tensor in tensors.items()}


def test_the_model_holds_bf16_values_from_the_start_and_masters_keep_fp32(make_policy: MakePolicy) -> None:
    policy, before = make_policy(), copies(make_policy().hf_parameters())
    optimizer = _optimizer(policy)
    assert same_bits(copies(policy.hf_parameters()), _rounded(before))
    assert same_bits(copies(optimizer.masters.items()), before)
    assert not same_bits(copies(policy.hf_parameters()), before)


def test_a_step_moves_masters_by_adamw_and_rounds_after(make_policy: MakePolicy) -> None:
    policy, twin = make_policy(), make_policy(sharded=False)
    optimizer = _optimizer(policy, learning_rate=1e-3, eps=1e-3, weight_decay=0.1, grad_clip=1e9)
    with torch.no_grad():
        masters = {name: parameter.clone() for name, parameter in twin.hf_parameters()}
        for parameter in twin.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    _backward(policy)
    _backward(twin)
    _step(optimizer)
    for name, parameter in twin.hf_parameters():
        assert parameter.grad is not None
        # First AdamW step by hand: bias-corrected moments are g and g²; learning rate warms up over 5 steps.
        learning_rate = 1e-3 / 5
        decayed = masters[name] * (1 - learning_rate * (0.1 if parameter.ndim >= 2 else 0.0))
        expected = decayed - learning_rate * parameter.grad / (parameter.grad.abs() + 1e-3)
        master = local_part(optimizer.masters[name]).detach()
        torch.testing.assert_close(master, expected, atol=1e-7, rtol=1e-5)
    assert same_bits(copies(policy.hf_parameters()), _rounded(copies(optimizer.masters.items())))
    assert optimizer.num_steps == 1


def test_updates_below_the_bf16_grid_are_kept_in_the_masters(policy: PolicyModel) -> None:
    optimizer = _optimizer(policy, learning_rate=1e-6, warmup_steps=0)
    before, published = copies(optimizer.masters.items()), copies(policy.hf_parameters())
    _backward(policy)
    _step(optimizer)
    moved = sum(int((local_part(optimizer.masters[name]) != before[name]).sum()) for name in before)
    flipped = sum(int((local_part(p) != published[name]).sum()) for name, p in policy.hf_parameters())
    assert moved > 1000
    assert flipped < moved / 20


def test_clipping_scales_the_gradient_to_the_bound(make_policy: MakePolicy) -> None:
    norms = []
    for bound in (1e9, 0.5):
        policy = make_policy()
        optimizer = _optimizer(policy, grad_clip=bound)
        _backward(policy)
        norm = optimizer.gradient_norm()
        optimizer.step(gradient_norm=norm)
        moments = [value for name, value in optimizer.state().items() if name.startswith("exp_avg.")]
        # The first moment after one step is (1 − beta1) times the clipped gradient.
        norms.append((norm, 10 * math.sqrt(sum(float(local_part(m).square().sum()) for m in moments))))
    assert norms[0][0] == pytest.approx(norms[0][1], rel=1e-4)
    assert norms[1] == (pytest.approx(norms[0][0]), pytest.approx(0.5, rel=1e-4))


def test_a_step_is_seen_by_the_next_forward_pass_even_after_scoring(make_policy: MakePolicy) -> None:
    """Scoring without backward leaves the outermost FSDP group gathered; the step must drop that copy."""
    policy = make_policy()
    optimizer = _optimizer(policy, learning_rate=0.1)
    (batch,) = pack(make_rows(), token_budget=500)
    _backward(policy)
    with torch.no_grad():
        before = policy.score(batch).logprob_N
        _step(optimizer)
        after = policy.score(batch).logprob_N
        fresh = make_policy(sharded=False)
        for name, parameter in fresh.hf_parameters():
            parameter.copy_(local_part(optimizer.masters[name]).to(torch.bfloat16))
        torch.testing.assert_close(after, fresh.score(batch).logprob_N)
    assert not torch.allclose(before, after)


SCHEDULES = [
    pytest.param({"warmup_steps": 4}, {0: 0.25, 1: 0.5, 2: 0.75, 3: 1, 4: 1, 5: 1}, id="linear warm-up"),
    pytest.param({"warmup_steps": 0}, {0: 1}, id="no warm-up"),
    pytest.param(
        {"shape": "linear", "warmup_steps": 0, "decay_steps": 10, "final_fraction": 0.2},
        {0: 1, 1: 0.92, 5: 0.6, 10: 0.2, 99: 0.2},
        id="a line to its fraction, where it stays",
    ),
    pytest.param(
        {"shape": "linear", "warmup_steps": 4, "decay_steps": 10, "final_fraction": 0.0},
        {0: 0.25, 1: 0.5 * 0.9, 2: 0.75 * 0.8, 3: 0.7, 4: 0.6},
        id="decay during the warm-up, too",
    ),
    pytest.param(
        {"shape": "linear", "warmup_steps": 2, "decay_from": 2, "decay_steps": 12, "final_fraction": 0.0},
        {0: 0.5, 1: 1, 2: 1, 3: 0.9, 7: 0.5, 12: 0, 13: 0},
        id="a line that begins after the warm-up",
    ),
    pytest.param(
        {"shape": "cosine", "warmup_steps": 2, "decay_from": 2, "decay_steps": 10, "final_fraction": 0.1},
        {1: 1, 2: 1, 4: 0.1 + 0.9 * (0.5 + math.sqrt(0.125)), 6: 0.55, 8: 0.1 + 0.9 * (0.5 - math.sqrt(0.125)),
         10: 0.1, 50: 0.1},
        id="half a cosine",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "factors"), SCHEDULES)
def test_factors_of_a_schedule(schedule: dict[str, float], factors: dict[int, float]) -> None:
    settings = ScheduleSettings(**schedule)  # type: ignore[arg-type]
    assert {step: settings.factor(step) for step in factors} == pytest.approx(factors)


def test_a_schedule_of_the_recipe_is_that_of_the_steps(policy: PolicyModel) -> None:
    optimizer = _optimizer(policy, learning_rate=1.0, schedule="linear", warmup_steps=1, decay_steps=3)
    rates = []
    for _ in range(4):
        rates.append(optimizer.learning_rate)
        _backward(policy)
        _step(optimizer)
    assert rates == pytest.approx([1, 1, 0.55, 0.1])


def test_an_average_is_the_mean_first_and_follows_then(policy: PolicyModel) -> None:
    optimizer = _optimizer(policy, learning_rate=0.1, warmup_steps=0, average={"decay": 0.6})
    name = "model.norm.weight"
    seen, average = [local_part(optimizer.masters[name]).detach().double()], torch.zeros(0)
    for step in range(1, 4):
        _backward(policy)
        _step(optimizer)
        seen.append(local_part(optimizer.masters[name]).detach().double().clone())
        # 1/2 of the first two, then 0.6 is less than 2/3.
        average = (seen[0] + seen[1]) / 2 if step == 1 else 0.6 * average + 0.4 * seen[-1]
    held = local_part(optimizer.state()[f"average.{name}"])
    torch.testing.assert_close(held.double(), average, rtol=1e-6, atol=1e-7)
    assert not torch.equal(held, seen[-1].float())


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_an_average_is_published_where_asked_for_and_training_goes_on_from_the_masters(
    make_policy: MakePolicy, compute: Compute
) -> None:
    for publish in (False, True):
        policy = make_policy(placement=Placement(compute=compute))
        optimizer = _optimizer(policy, learning_rate=0.1, average={"decay": 0.9, "publish": publish})
        _backward(policy)
        _step(optimizer)
        before = copies(policy.hf_parameters())
        with optimizer.as_published():
            shown = _rounded(copies(policy.hf_parameters()))
        kind = "average" if publish else "master"
        expected = {name: optimizer.state()[f"{kind}.{name}"] for name in shown}
        assert same_bits(shown, _rounded(copies(expected.items())))
        assert same_bits(copies(policy.hf_parameters()), before)
    assert not same_bits(shown, _rounded(before))


def test_learning_rate_can_be_changed_and_is_checked(policy: PolicyModel) -> None:
    optimizer = _optimizer(policy, learning_rate=1.0)
    optimizer.set_learning_rate(0.5)
    assert optimizer.learning_rate == pytest.approx(0.1)
    with pytest.raises(ValueError, match="must be finite and at least 0"):
        optimizer.set_learning_rate(-1.0)


def test_adopted_weights_are_the_models_and_equal_masters_keep_their_fp32(policy: PolicyModel) -> None:
    optimizer = _optimizer(policy, learning_rate=1e-3)
    _backward(policy)
    _step(optimizer)
    before = copies(optimizer.masters.items())
    wanted = {name: master.to(torch.bfloat16).view(-1).clone() for name, master in before.items()}
    changed = wanted["model.norm.weight"]
    changed[0], changed[1] = 3.0, float("inf")
    optimizer.adopt(wanted)
    for name, parameter in policy.hf_parameters():
        bits = local_part(parameter).to(torch.bfloat16).view(-1).view(torch.int16)
        assert torch.equal(bits, wanted[name].view(torch.int16)), name
    for name, master in optimizer.masters.items():
        kept = slice(2, None) if name == "model.norm.weight" else slice(None)
        assert torch.equal(local_part(master).view(-1)[kept], before[name].view(-1)[kept])
    assert float(local_part(optimizer.masters["model.norm.weight"]).detach()[0]) == 3.0
