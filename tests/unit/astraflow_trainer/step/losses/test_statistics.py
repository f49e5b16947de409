"""Statistics of the parts add up to those of the whole."""

import math

import pytest
import torch

from astraflow.recipe.algorithm import AlgorithmSettings, PpoClip
from astraflow_trainer.ranks.reductions import OneRank
from astraflow_trainer.step.losses import LossInputs, LossStatistics, policy_loss


def _statistics(chosen: slice) -> LossStatistics:
    generator = torch.Generator().manual_seed(3)
    behavior = -2 * torch.rand(20, generator=generator)
    logprobs = (behavior + 0.3 * torch.randn(20, generator=generator))[chosen]
    inputs = LossInputs(
        row_N=torch.zeros(20, dtype=torch.int64)[chosen],
        num_rows=1,
        advantage_N=torch.randn(20, generator=generator)[chosen],
        weight_N=torch.full((20,), 0.05)[chosen],
        behavior_N=behavior[chosen],
        entropy_N=torch.rand(20, generator=generator)[chosen],
    )
    region = PpoClip()
    return policy_loss(logprobs, inputs=inputs, region=region, settings=AlgorithmSettings(loss=region))[1]


def test_adding_parts_gives_the_whole() -> None:
    whole = _statistics(slice(0, 20)).metrics()
    parts = _statistics(slice(0, 7)) + _statistics(slice(7, 20)) + LossStatistics.empty()
    for name in whole.__slots__:
        assert getattr(parts.over_ranks(OneRank()).metrics(), name) == pytest.approx(
            getattr(whole, name), rel=1e-5
        ), name


def test_no_token_has_no_metrics() -> None:
    assert LossStatistics.empty().maxima.tolist() == [-math.inf] * 3
    with pytest.raises(ValueError, match="skip the step"):
        LossStatistics.empty().metrics()
