"""Log-probs of chosen tokens from hidden states, without ever holding the logits of all of them.

Logits are computed for a chunk of tokens at a time and recomputed in the backward pass; what is kept is one
number per token. Invariant: value and gradient equal those of `log_softmax(hidden @ head.T / temperature)` at
the targets, and of its entropy, whatever the chunk size. Called by the policy model's forward pass.

Shape legend: N tokens, D hidden, V vocabulary, C tokens of one chunk.
"""

from collections.abc import Iterator
from typing import Any

import torch

# 16 MiB of float32 logits at a time, but never so few tokens that the matrix product starves.
_CHUNK_ELEMENTS = 2**22
_MIN_CHUNK_TOKENS = 256


def token_scores(
    hidden_ND: torch.Tensor,
    *,
    head_VD: torch.Tensor,
    target_N: torch.Tensor,
    temperature_N: torch.Tensor,
    chunk_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target and entropy of its distribution, float32[N] each, differentiable.

    Both are of the softmax of logits / temperature, in natural log. A gradient of the entropy costs one more chunk.
    """
    chunk = chunk_tokens or chunk_tokens_of(head_VD.shape[0])
    scores: tuple[torch.Tensor, torch.Tensor] = _TokenScores.apply(  # type: ignore[no-untyped-call]
        hidden_ND, head_VD, target_N, temperature_N, chunk
    )

    return scores


def chunk_tokens_of(num_words: int) -> int:
    """Tokens whose logits are held at a time, with a vocabulary of so many."""
    return max(_MIN_CHUNK_TOKENS, _CHUNK_ELEMENTS // num_words)


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context object has no public type
        hidden_ND: torch.Tensor,
        head_VD: torch.Tensor,
        target_N: torch.Tensor,
        temperature_N: torch.Tensor,
        chunk_tokens: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens = len(target_N)
        logprob_N, normaliser_N, entropy_N = torch.empty(3, num_tokens, device=hidden_ND.device).unbind()
        for chunk in _chunks(num_tokens, chunk_tokens):
            logits_CV = _scaled_logits(hidden_ND[chunk], head_VD, temperature_N[chunk])
            normaliser_N[chunk] = logits_CV.logsumexp(-1)
            logprob_N[chunk] = logits_CV.gather(1, target_N[chunk, None])[:, 0] - normaliser_N[chunk]
            probabilities_CV = (logits_CV - normaliser_N[chunk, None]).exp_()
            entropy_N[chunk] = normaliser_N[chunk] - probabilities_CV.mul_(logits_CV).sum(-1)
        entropy_N = entropy_N.clone()
        ctx.save_for_backward(hidden_ND, head_VD, target_N, temperature_N, normaliser_N, entropy_N)
        ctx.chunk_tokens = chunk_tokens
        ctx.set_materialize_grads(False)
        return logprob_N.clone(), entropy_N

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401 - torch's context object has no public type
        grad_N: torch.Tensor | None,
        grad_entropy_N: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        hidden_ND, head_VD, target_N, temperature_N, normaliser_N, entropy_N = ctx.saved_tensors
        grad_N = torch.zeros_like(entropy_N) if grad_N is None else grad_N
        grad_hidden_ND = torch.empty_like(hidden_ND)
        # Many chunks are added up: in bf16 the sum would stop growing.
        grad_head_VD = torch.zeros_like(head_VD, dtype=torch.float32)
        for chunk in _chunks(len(target_N), ctx.chunk_tokens):
            logits_CV = _scaled_logits(hidden_ND[chunk], head_VD, temperature_N[chunk])
            share_C = grad_N[chunk] / temperature_N[chunk]
            # d logprob / d logits = (one-hot of the target − probabilities) / temperature.
            log_CV = logits_CV.sub_(normaliser_N[chunk, None])
            factor_CV = -share_C[:, None]
            if grad_entropy_N is not None:
                # d entropy / d logits = −probability · (log-probability + entropy) / temperature.
                entropy_share_C = grad_entropy_N[chunk] / temperature_N[chunk]
                factor_CV = factor_CV - (log_CV + entropy_N[chunk, None]).mul_(entropy_share_C[:, None])
            grad_CV = log_CV.exp_().mul_(factor_CV)
            grad_CV.scatter_add_(1, target_N[chunk, None], share_C[:, None])
            grad_CV = grad_CV.to(head_VD.dtype)
            grad_hidden_ND[chunk] = grad_CV @ head_VD
            if head_VD.dtype == torch.float32:
                grad_head_VD.addmm_(grad_CV.T, hidden_ND[chunk])
            else:
                grad_head_VD.add_(grad_CV.T @ hidden_ND[chunk])
        return grad_hidden_ND, grad_head_VD.to(head_VD.dtype), None, None, None


def _scaled_logits(
    hidden_CD: torch.Tensor, head_VD: torch.Tensor, temperature_C: torch.Tensor
) -> torch.Tensor:
    return (hidden_CD @ head_VD.T).float().div_(temperature_C[:, None])


def _chunks(num_tokens: int, chunk_tokens: int) -> Iterator[slice]:
    for start in range(0, num_tokens, chunk_tokens):
        yield slice(start, min(start + chunk_tokens, num_tokens))
