"""Chunked log-probs equal the plain formula in value and gradient, whatever the chunk."""

import pytest
import torch

from astraflow_trainer.model.logprobs import token_scores


def _inputs(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, 6, generator=generator, requires_grad=True)
    head = torch.randn(11, 6, generator=generator, requires_grad=True)
    targets = torch.randint(0, 11, (num_tokens,), generator=generator)
    temperatures = torch.rand(num_tokens, generator=generator) + 0.5
    return hidden, head, targets, temperatures


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 100])
def test_value_and_gradient_equal_log_softmax(chunk_tokens: int) -> None:
    hidden, head, targets, temperatures = _inputs(7)
    weights = torch.linspace(-1, 1, 7)
    others = {"head_VD": head, "target_N": targets, "temperature_N": temperatures}
    logprobs, entropies = token_scores(hidden, **others, chunk_tokens=chunk_tokens)
    plain = torch.log_softmax(hidden @ head.T / temperatures[:, None], dim=-1)
    expected = plain.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected)
    entropy = -(plain.exp() * plain).sum(-1)
    torch.testing.assert_close(entropies, entropy)
    both, neither = (weights * logprobs + 0.3 * entropies).sum(), (weights * expected + 0.3 * entropy).sum()
    for mine, theirs in ((logprobs.sum(), expected.sum()), (entropies.sum(), entropy.sum()), (both, neither)):
        wanted = torch.autograd.grad(theirs, [hidden, head], retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(mine, [hidden, head], retain_graph=True), wanted)


def test_gradient_passes_a_numerical_check() -> None:
    hidden, head, targets, temperatures = _inputs(5)
    others = {"head_VD": head, "target_N": targets, "temperature_N": temperatures}
    eps = 1e-3

    def loss(values: torch.Tensor) -> torch.Tensor:
        return token_scores(values, **others, chunk_tokens=2)[0].sum()

    (gradient,) = torch.autograd.grad(loss(hidden), [hidden])
    step = torch.zeros_like(hidden)
    step[2, 3] = eps
    with torch.no_grad():
        numerical = (loss(hidden + step) - loss(hidden - step)) / (2 * eps)
    assert float(gradient[2, 3]) == pytest.approx(float(numerical), rel=2e-3)


def test_no_token_gives_zero_gradient() -> None:
    hidden, head, targets, temperatures = _inputs(0)
    logprobs, _ = token_scores(hidden, head_VD=head, target_N=targets, temperature_N=temperatures)
    (gradient,) = torch.autograd.grad(logprobs.sum(), [head])
    assert not gradient.any()


def test_full_logits_are_never_held() -> None:
    """The largest tensor that the forward pass saves is a hidden state, not a row of logits per token."""
    hidden, head, targets, temperatures = _inputs(50)
    saved: list[int] = []

    def record(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        token_scores(hidden, head_VD=head, target_N=targets, temperature_N=temperatures, chunk_tokens=5)
    assert max(saved) == hidden.numel()
    assert 50 * 11 not in saved
