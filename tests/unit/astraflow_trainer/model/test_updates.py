"""Each rule beside its formula in float64, what it decays, and that 8 bits train as 32 do."""

from typing import Any

import pytest
import torch
from torch import nn

from astraflow.recipe import OptimizerSettings
from astraflow_trainer.batches.packing import pack
from astraflow_trainer.model.model import local_part
from astraflow_trainer.model.optimizer import MasterOptimizer
from astraflow_trainer.model.quantized import ROOTS, SIGNED, dequantized
from astraflow_trainer.model.updates import Update, orthogonalized, updates_for
from support.tiny_training import MakePolicy, make_rows

LEARNING_RATE = 1e-2
SHAPES = {
    "embed.weight": (9, 6),
    "layer.weight": (6, 300),
    "layer.bias": (6,),
    "experts": (3, 5, 4),
    "norm.weight": (6,),
}


def _updates(**settings: Any) -> tuple[dict[str, nn.Parameter], list[Update]]:
    generator = torch.Generator().manual_seed(0)
    masters = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}
    chosen = OptimizerSettings(learning_rate=LEARNING_RATE, **settings)
    return masters, updates_for(masters, chosen, embeddings={"embed.weight"})


def _gradients(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _step(masters: dict[str, nn.Parameter], updates: list[Update], seed: int) -> None:
    for name, gradient in _gradients(seed).items():
        masters[name].grad = gradient
    for update in updates:
        update.step(learning_rate=LEARNING_RATE)


def _adamw(
    weights: torch.Tensor, gradient: torch.Tensor, first: torch.Tensor, second: torch.Tensor, step: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """arXiv 1711.05101, algorithm 2, without decay; float64."""
    first = 0.9 * first + 0.1 * gradient
    second = 0.95 * second + 0.05 * gradient**2
    moved = LEARNING_RATE * (first / (1 - 0.9**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
    return weights - moved, first, second


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """The same polynomial of its singular values, five times: what Newton-Schulz computes."""
    left, values, right = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ torch.diag(values) @ right


def test_8_bit_moments_are_read_stepped_and_written_as_the_formula_says() -> None:
    masters, updates = _updates(kind="adamw_8bit")
    _step(masters, updates, 0)
    state = {name: tensor.clone() for update in updates for name, tensor in update.state().items()}
    before = {name: master.detach().double() for name, master in masters.items()}
    _step(masters, updates, 1)
    for name in ("embed.weight", "layer.weight", "experts"):
        codes, scales = (
            [state[f"{moment}_{part}.{name}"] for moment in ("exp_avg", "exp_avg_sq")]
            for part in ("codes", "scales")
        )
        first = dequantized(codes[0], scales[0], SIGNED).double()
        second = dequantized(codes[1], scales[1], ROOTS).double() ** 2
        expected, *_ = _adamw(before[name], _gradients(1)[name].double(), first, second, 2)
        torch.testing.assert_close(masters[name].detach().double(), expected, rtol=1e-5, atol=1e-6)
    moments = updates[0].state()
    bytes_each = sum(tensor.numel() * tensor.element_size() for tensor in moments.values())
    large = sum(masters[name].numel() for name in ("embed.weight", "layer.weight", "experts"))
    scales = sum(tensor.numel() for name, tensor in moments.items() if "_scales." in name)
    assert bytes_each == 2 * large + 4 * scales


def test_adamw_over_several_steps_is_the_formula() -> None:
    masters, updates = _updates()
    state = {
        name: (m.detach().double(), torch.zeros(m.shape).double(), torch.zeros(m.shape).double())
        for name, m in masters.items()
    }
    for step in (1, 2, 3):
        _step(masters, updates, step)
        state = {
            name: _adamw(state[name][0], _gradients(step)[name].double(), *state[name][1:], step)
            for name in state
        }
    for name, (expected, *_) in state.items():
        torch.testing.assert_close(masters[name].detach().double(), expected, rtol=1e-5, atol=1e-6)


def test_muon_is_its_formula_for_matrices_and_each_expert_and_adamw_for_the_rest() -> None:
    masters, updates = _updates(kind="muon", weight_decay=0.5)
    twins, adamw = _updates(weight_decay=0.5)
    weights = {name: masters[name].detach().double() for name in SHAPES}
    momentum = {name: torch.zeros(SHAPES[name]).double() for name in SHAPES}
    for step in (1, 2):
        _step(masters, updates, step)
        _step(twins, adamw, step)
        for name in ("layer.weight", "experts"):
            gradient = _gradients(step)[name].double()
            momentum[name] = 0.95 * momentum[name] + 0.05 * gradient
            update = 0.95 * momentum[name] + 0.05 * gradient
            matrices = [update] if update.ndim == 2 else list(update)
            moved = torch.stack([_orthogonal(matrix) for matrix in matrices]).view(update.shape)
            scale = 0.2 * max(update.shape[-2:]) ** 0.5
            weights[name] = weights[name] * (1 - LEARNING_RATE * 0.5) - LEARNING_RATE * scale * moved
    for name in ("layer.weight", "experts"):
        torch.testing.assert_close(masters[name].detach().double(), weights[name], rtol=1e-4, atol=1e-5)
    for name in ("embed.weight", "layer.bias", "norm.weight"):
        assert torch.equal(masters[name], twins[name]), name


def test_muon_agrees_with_torchs_own_within_the_bf16_that_it_iterates_in() -> None:
    ours, updates = _updates(kind="muon")
    theirs = nn.Parameter(ours["layer.weight"].detach().clone())
    other = torch.optim.Muon([theirs], lr=LEARNING_RATE, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    before = theirs.detach().clone()
    for step in (1, 2):
        _step(ours, updates, step)
        theirs.grad = _gradients(step)["layer.weight"]
        other.step()
    moved, expected = ours["layer.weight"].detach() - before, theirs.detach() - before
    assert (moved - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (2, 5, 5)])
def test_orthogonalized_matrices_have_singular_values_near_1(shape: tuple[int, ...]) -> None:
    values = torch.linalg.svdvals(
        orthogonalized(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    )
    assert values.min() > 0.3
    assert values.max() < 1.3


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "muon"])
@pytest.mark.parametrize(
    ("no_decay", "untouched"),
    [
        (["norms", "biases"], {"layer.bias", "norm.weight"}),
        (["embeddings"], {"embed.weight"}),
        ([], set()),
    ],
)
def test_weight_decay_leaves_alone_what_is_named(kind: str, no_decay: list[str], untouched: set[str]) -> None:
    decayed, with_decay = _updates(kind=kind, weight_decay=0.5, no_decay=no_decay)
    plain, without = _updates(kind=kind)
    _step(decayed, with_decay, 0)
    _step(plain, without, 0)
    assert {name for name in SHAPES if torch.equal(decayed[name], plain[name])} == untouched


def test_8_bit_moments_train_as_fp32_ones_do_in_a_quarter_of_the_memory(make_policy: MakePolicy) -> None:
    batches = pack(make_rows(), token_budget=500)
    losses, moments = {}, {}
    for kind in ("adamw", "adamw_8bit"):
        policy = make_policy()
        settings = OptimizerSettings.model_validate({"kind": kind, "learning_rate": 1e-2, "warmup_steps": 0})
        optimizer = MasterOptimizer(policy, settings=settings)
        losses[kind] = []
        for _ in range(25):
            loss = -sum(policy.score(batch).logprob_N.sum() for batch in batches)
            assert isinstance(loss, torch.Tensor)
            loss.backward()
            optimizer.step(gradient_norm=optimizer.gradient_norm())
            losses[kind].append(float(loss.detach()))
        held = {name: local_part(tensor) for name, tensor in optimizer.state().items() if "exp_avg" in name}
        moments[kind] = sum(tensor.numel() * tensor.element_size() for tensor in held.values())
    assert losses["adamw"][-1] < 0.7 * losses["adamw"][0]
    assert losses["adamw_8bit"] == pytest.approx(losses["adamw"], abs=0.005 * losses["adamw"][0])
    # Rows of 16 to 32 numbers, of which each has a scale of its own here: 1.19 bytes a weight and moment, not 1.02.
    assert moments["adamw_8bit"] < 0.4 * moments["adamw"]
