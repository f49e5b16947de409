"""Masters, rounding, schedule, clipping and discarding."""

import math
from collections.abc import Callable

import pytest
import torch

from astraflow.recipe import OptimizerSettings
from astraflow_trainer.batches.packing import pack
from astraflow_trainer.batches.rows import TrainingRow
from astraflow_trainer.model.model import PolicyModel, local_part
from astraflow_trainer.model.optimizer import MasterOptimizer, ScheduleSettings

MakePolicy = Callable[..., PolicyModel]
MakeRows = Callable[..., list[TrainingRow]]


def _backward(policy: PolicyModel, rows: list[TrainingRow]) -> None:
    for batch in pack(rows, token_budget=500):
        policy.score(batch).logprob_N.sum().backward()


def _assert_rounded(policy: PolicyModel, optimizer: MasterOptimizer) -> None:
    for name, parameter in policy.hf_parameters():
        master = local_part(optimizer.masters[name])
        assert torch.equal(local_part(parameter), master.to(torch.bfloat16).float()), name


def test_the_model_holds_bf16_values_from_the_start_and_masters_keep_fp32(make_policy: MakePolicy) -> None:
    before = {
        name: local_part(parameter).detach().clone() for name, parameter in make_policy().hf_parameters()
    }
    policy = make_policy()
    optimizer = MasterOptimizer(policy, settings=OptimizerSettings())
    _assert_rounded(policy, optimizer)
    for name, master in optimizer.masters.items():
        assert torch.equal(local_part(master), before[name])
    assert any(not torch.equal(local_part(p), before[name]) for name, p in policy.hf_parameters())


def test_rounding_is_to_nearest_even() -> None:
    """1 + 2⁻⁸ lies between two bf16 values and goes to the even one; a little more goes up."""
    values = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20])
    assert values.to(torch.bfloat16).float().tolist() == [1.0, 1 + 2**-6, 1 + 2**-7]


def test_a_step_moves_masters_by_adamw_and_rounds_after(make_policy: MakePolicy, make_rows: MakeRows) -> None:
    policy, twin = make_policy(), make_policy(sharded=False)
    settings = OptimizerSettings(learning_rate=1e-3, eps=1e-3, weight_decay=0.1, grad_clip=1e9)
    optimizer = MasterOptimizer(policy, settings=settings)
    with torch.no_grad():
        masters = {name: parameter.clone() for name, parameter in twin.hf_parameters()}
        for parameter in twin.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    _backward(policy, make_rows())
    _backward(twin, make_rows())
    optimizer.step(gradient_norm=optimizer.gradient_norm())
    for name, parameter in twin.hf_parameters():
        assert parameter.grad is not None
        # First AdamW step by hand: bias-corrected moments are g and g²; learning rate warms up over 5 steps.
        learning_rate = 1e-3 / 5
        decayed = masters[name] * (1 - learning_rate * (0.1 if parameter.ndim >= 2 else 0.0))
        expected = decayed - learning_rate * parameter.grad / (parameter.grad.abs() + 1e-3)
        torch.testing.assert_close(
            local_part(optimizer.masters[name]).detach(), expected, atol=1e-7, rtol=1e-5
        )
    _assert_rounded(policy, optimizer)
    assert optimizer.num_steps == 1


def test_updates_below_the_bf16_grid_are_kept_in_the_masters(
    make_policy: MakePolicy, make_rows: MakeRows
) -> None:
    policy = make_policy()
    optimizer = MasterOptimizer(policy, settings=OptimizerSettings(learning_rate=1e-6, warmup_steps=0))
    before = {name: local_part(master).detach().clone() for name, master in optimizer.masters.items()}
    published = {name: local_part(parameter).detach().clone() for name, parameter in policy.hf_parameters()}
    _backward(policy, make_rows())
    optimizer.step(gradient_norm=optimizer.gradient_norm())
    moved = sum(int((local_part(optimizer.masters[name]) != before[name]).sum()) for name in before)
    flipped = sum(int((local_part(p) != published[name]).sum()) for name, p in policy.hf_parameters())
    assert moved > 1000
    assert flipped < moved / 20


def test_clipping_scales_the_gradient_to_the_bound(make_policy: MakePolicy, make_rows: MakeRows) -> None:
    norms = []
    for bound in (1e9, 0.5):
        policy = make_policy()
        optimizer = MasterOptimizer(policy, settings=OptimizerSettings(grad_clip=bound))
        _backward(policy, make_rows())
        norm = optimizer.gradient_norm()
        optimizer.step(gradient_norm=norm)
        moments = [value for name, value in optimizer.state().items() if name.startswith("exp_avg.")]
        # The first moment after one step is (1 − beta1) times the clipped gradient.
        norms.append((norm, 10 * math.sqrt(sum(float(local_part(m).square().sum()) for m in moments))))
    assert norms[0][0] == pytest.approx(norms[0][1], rel=1e-4)
    assert norms[1] == (pytest.approx(norms[0][0]), pytest.approx(0.5, rel=1e-4))


def test_discarding_leaves_everything_as_it_was(make_policy: MakePolicy, make_rows: MakeRows) -> None:
    policy = make_policy()
    optimizer = MasterOptimizer(policy, settings=OptimizerSettings(learning_rate=1e-2))
    before = {name: local_part(value).detach().clone() for name, value in optimizer.state().items()}
    _backward(policy, make_rows())
    optimizer.discard()
    assert optimizer.num_steps == 0
    assert all(parameter.grad is None for parameter in policy.parameters())
    assert all(torch.equal(local_part(value), before[name]) for name, value in optimizer.state().items())


def test_a_step_is_seen_by_the_next_forward_pass_even_after_scoring(
    make_policy: MakePolicy, make_rows: MakeRows
) -> None:
    """Scoring without backward leaves the outermost FSDP group gathered; the step must drop that copy."""
    policy, rows = make_policy(), make_rows()
    optimizer = MasterOptimizer(policy, settings=OptimizerSettings(learning_rate=0.1))
    (batch,) = pack(rows, token_budget=500)
    _backward(policy, rows)
    with torch.no_grad():
        before = policy.score(batch).logprob_N
        optimizer.step(gradient_norm=optimizer.gradient_norm())
        after = policy.score(batch).logprob_N
        fresh = make_policy(sharded=False)
        for name, parameter in fresh.hf_parameters():
            parameter.copy_(local_part(optimizer.masters[name]).to(torch.bfloat16))
        torch.testing.assert_close(after, fresh.score(batch).logprob_N)
    assert not torch.allclose(before, after)


def test_constant_schedule_warms_up_linearly() -> None:
    schedule = ScheduleSettings(warmup_steps=4)
    assert [schedule.factor(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert ScheduleSettings(warmup_steps=0).factor(0) == 1.0


def test_linear_schedule_falls_along_a_line_to_its_fraction_and_stays_there() -> None:
    schedule = ScheduleSettings(warmup_steps=0, decay_steps=10, final_fraction=0.2)
    factors = [schedule.factor(step) for step in (0, 1, 5, 10, 99)]
    assert factors == [pytest.approx(expected) for expected in (1.0, 0.92, 0.6, 0.2, 0.2)]


def test_linear_decay_runs_during_the_warm_up_too() -> None:
    schedule = ScheduleSettings(warmup_steps=4, decay_steps=10, final_fraction=0.0)
    assert [schedule.factor(step) for step in range(5)] == [
        pytest.approx(expected) for expected in (0.25, 0.5 * 0.9, 0.75 * 0.8, 0.7, 0.6)
    ]


def test_learning_rate_can_be_changed_and_is_checked(make_policy: MakePolicy) -> None:
    optimizer = MasterOptimizer(make_policy(), settings=OptimizerSettings(learning_rate=1.0))
    optimizer.set_learning_rate(0.5)
    assert optimizer.learning_rate == pytest.approx(0.1)
    with pytest.raises(ValueError, match="must be finite and at least 0"):
        optimizer.set_learning_rate(-1.0)


def test_adopted_weights_are_the_models_and_equal_masters_keep_what_is_beyond_bf16(
    make_policy: MakePolicy, make_rows: MakeRows
) -> None:
    policy = make_policy()
    optimizer = MasterOptimizer(policy, settings=OptimizerSettings(learning_rate=1e-3))
    _backward(policy, make_rows())
    optimizer.step(gradient_norm=optimizer.gradient_norm())
    before = {name: local_part(master).detach().clone() for name, master in optimizer.masters.items()}
    wanted = {name: master.to(torch.bfloat16).view(-1).clone() for name, master in before.items()}
    changed = wanted["model.norm.weight"]
    changed[0], changed[1] = 3.0, float("inf")
    optimizer.adopt(wanted)
    _assert_same_bits(policy, wanted)
    for name, master in optimizer.masters.items():
        kept = slice(2, None) if name == "model.norm.weight" else slice(None)
        assert torch.equal(local_part(master).view(-1)[kept], before[name].view(-1)[kept])
    assert float(local_part(optimizer.masters["model.norm.weight"]).detach()[0]) == 3.0


def _assert_same_bits(policy: PolicyModel, wanted: dict[str, torch.Tensor]) -> None:
    for name, parameter in policy.hf_parameters():
        bits = local_part(parameter).to(torch.bfloat16).view(-1).view(torch.int16)
        assert torch.equal(bits, wanted[name].view(torch.int16)), name
