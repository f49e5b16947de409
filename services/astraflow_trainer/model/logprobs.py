"""Log-probs of chosen tokens from hidden states, without ever holding the logits of all of them.

Logits are computed for a chunk of tokens at a time and recomputed in the backward pass; what is kept is one
number per token. Invariant: value and gradient equal those of `log_softmax(hidden @ head.T / temperature)` at
the targets, and of its entropy, whatever the chunk size. Called by the policy model's forward pass.

Shape legend: N tokens, D hidden, V vocabulary, C tokens of one chunk.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

# 16 MiB of float32 logits at a time, but never so few tokens that the matrix product starves. On a GPU 1 GiB: the
# gradient of the head is read and written once a chunk.
_CHUNK_ELEMENTS = {"cpu": 2**22, "gpu": 2**28}
_MIN_CHUNK_TOKENS = 256


def token_scores(
    hidden_ND: torch.Tensor,
    *,
    head_VD: torch.Tensor,
    target_N: torch.Tensor,
    temperature_N: torch.Tensor,
    chunk_tokens: int | None = None,
    compiler: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target and entropy of its distribution, float32[N] each, differentiable.

    Both are of the softmax of logits / temperature, in natural log. A gradient of the entropy costs one more chunk.
    `compiler` is the backend of torch that compiles what is done with the logits of a chunk; None runs it as it is.
    """
    chunk = chunk_tokens or chunk_tokens_of(head_VD.shape[0], on_gpu=hidden_ND.is_cuda)
    scores: tuple[torch.Tensor, torch.Tensor] = _TokenScores.apply(  # type: ignore[no-untyped-call]
        hidden_ND, head_VD, target_N, temperature_N, chunk, compiler
    )

    return scores


def chunk_tokens_of(num_words: int, *, on_gpu: bool) -> int:
    """Tokens whose logits are held at a time, with a vocabulary of so many."""
    return max(_MIN_CHUNK_TOKENS, _CHUNK_ELEMENTS["gpu" if on_gpu else "cpu"] // num_words)


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context object has no public type
        hidden_ND: torch.Tensor,
        head_VD: torch.Tensor,
        target_N: torch.Tensor,
        temperature_N: torch.Tensor,
        chunk_tokens: int,
        compiler: str | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens = len(target_N)
        scored = _compiled(_scored, compiler)
        logprob_N, normaliser_N, entropy_N = torch.empty(3, num_tokens, device=hidden_ND.device).unbind()
        for chunk in _chunks(num_tokens, chunk_tokens):
            logprob_N[chunk], normaliser_N[chunk], entropy_N[chunk] = scored(
                hidden_ND[chunk], head_VD, target_N[chunk], temperature_N[chunk]
            )
        entropy_N = entropy_N.clone()
        ctx.save_for_backward(hidden_ND, head_VD, target_N, temperature_N, normaliser_N, entropy_N)
        ctx.chunk_tokens, ctx.compiler = chunk_tokens, compiler
        ctx.set_materialize_grads(False)
        return logprob_N.clone(), entropy_N

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 - torch's context object has no public type
        grad_N: torch.Tensor | None,
        grad_entropy_N: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, None, None, None, None]:
        hidden_ND, head_VD, target_N, temperature_N, normaliser_N, entropy_N = ctx.saved_tensors
        grad_N = torch.zeros_like(entropy_N) if grad_N is None else grad_N
        grad_hidden_ND = torch.empty_like(hidden_ND)
        # Many chunks are added up: in bf16 the sum would stop growing.
        grad_head_VD = torch.zeros_like(head_VD, dtype=torch.float32)
        gradient = _compiled(_gradient, ctx.compiler)
        for chunk in _chunks(len(target_N), ctx.chunk_tokens):
            grad_CV = gradient(
                hidden_ND[chunk],
                head_VD,
                target_N[chunk],
                temperature_N[chunk],
                normaliser_N[chunk],
                entropy_N[chunk],
                grad_N[chunk],
                None if grad_entropy_N is None else grad_entropy_N[chunk],
            )
            grad_hidden_ND[chunk] = grad_CV @ head_VD
            if head_VD.dtype == torch.float32:
                grad_head_VD.addmm_(grad_CV.T, hidden_ND[chunk])
            else:
                grad_head_VD.add_(grad_CV.T @ hidden_ND[chunk])
        return grad_hidden_ND, grad_head_VD.to(head_VD.dtype), None, None, None, None


def _scored(
    hidden_CD: torch.Tensor, head_VD: torch.Tensor, target_C: torch.Tensor, temperature_C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs of the targets, log of the sum over words, and entropies, float32[C] each."""
    scaled_CV = _scaled_logits(hidden_CD, head_VD, temperature_C)
    normaliser_C = scaled_CV.logsumexp(-1)
    logprob_C = scaled_CV.gather(1, target_C[:, None])[:, 0] - normaliser_C
    probabilities_CV = (scaled_CV - normaliser_C[:, None]).exp_()
    return logprob_C, normaliser_C, normaliser_C - probabilities_CV.mul_(scaled_CV).sum(-1)


def _gradient(
    hidden_CD: torch.Tensor,
    head_VD: torch.Tensor,
    target_C: torch.Tensor,
    temperature_C: torch.Tensor,
    normaliser_C: torch.Tensor,
    entropy_C: torch.Tensor,
    grad_C: torch.Tensor,
    grad_entropy_C: torch.Tensor | None,
) -> torch.Tensor:
    """That of the logits [C, V], in the precision of the head, from those of log-probs and entropies."""
    share_C = grad_C / temperature_C
    # d logprob / d logits = (one-hot of the target − probabilities) / temperature.
    log_CV = _scaled_logits(hidden_CD, head_VD, temperature_C).sub_(normaliser_C[:, None])
    factor_CV = -share_C[:, None]
    if grad_entropy_C is not None:
        # d entropy / d logits = −probability · (log-probability + entropy) / temperature.
        entropy_share_C = grad_entropy_C / temperature_C
        factor_CV = factor_CV - (log_CV + entropy_C[:, None]).mul_(entropy_share_C[:, None])
    grad_CV = log_CV.exp_().mul_(factor_CV)
    grad_CV.scatter_add_(1, target_C[:, None], share_C[:, None])
    return grad_CV.to(head_VD.dtype)


def _scaled_logits(
    hidden_CD: torch.Tensor, head_VD: torch.Tensor, temperature_C: torch.Tensor
) -> torch.Tensor:
    return (hidden_CD @ head_VD.T).float().div_(temperature_C[:, None])


@cache
def _compiled(work: Callable[..., Any], compiler: str | None) -> Callable[..., Any]:
    """Few passes over the logits instead of one an operation; compiled as it is first called."""
    return work if compiler is None else torch.compile(work, dynamic=True, backend=compiler)


def _chunks(num_tokens: int, chunk_tokens: int) -> Iterator[slice]:
    for start in range(0, num_tokens, chunk_tokens):
        yield slice(start, min(start + chunk_tokens, num_tokens))
