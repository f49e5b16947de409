"""KL estimators: clamps, and that k1 and k3 are unbiased where k2 is not."""

import pytest
import torch

from astraflow.recipe.algorithm import KlEstimator
from astraflow_trainer.step.losses.kl import kl_estimate


def test_expectation_of_k1_and_k3_is_the_divergence() -> None:
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.25, 0.25])
    divergence = float((policy * (policy / reference).log()).sum())
    for estimator in (KlEstimator.K1, KlEstimator.K3):
        estimates = kl_estimate(policy.log(), reference_N=reference.log(), estimator=estimator)
        assert float((policy * estimates).sum()) == pytest.approx(divergence, rel=1e-5)


def test_extremes_are_clamped() -> None:
    far = torch.tensor([-100.0])
    assert float(kl_estimate(far, reference_N=torch.tensor([0.0]), estimator=KlEstimator.K3)) == 10.0
    assert float(kl_estimate(far, reference_N=torch.tensor([0.0]), estimator=KlEstimator.K1)) == -20.0
