"""KL estimators between the trained policy and a reference, per token.

Owns the estimators and their clamps. Values are differentiable in the policy's log-probs; which
gradient each has is said at `KlEstimator`. Called by the loss kernel, and by its metrics without gradient.
"""

import torch

from astraflow.recipe.algorithm import KlEstimator

_MAX_LOG_RATIO = 20.0
_MAX_K3 = 10.0


def kl_estimate(
    logprob_N: torch.Tensor, *, reference_N: torch.Tensor, estimator: KlEstimator
) -> torch.Tensor:
    """float32[N]: estimate of KL(policy ‖ reference) per token, natural log."""
    x = (reference_N - logprob_N).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    match estimator:
        case KlEstimator.K1:
            return -x
        case KlEstimator.K2:
            return 0.5 * x * x
        case KlEstimator.K3:
            return (torch.expm1(x) - x).clamp(max=_MAX_K3)
        case KlEstimator.K3_K2:
            k2, k3 = (
                kl_estimate(logprob_N, reference_N=reference_N, estimator=estimator)
                for estimator in (KlEstimator.K2, KlEstimator.K3)
            )
            return k2 + (k3 - k2).detach()
