"""Statistics of the parts add up to those of the whole."""

import math

import pytest
import torch

from astraflow.recipe.algorithm import AlgorithmSettings, PpoClip
from astraflow_trainer.ranks.reductions import OneRank
from astraflow_trainer.step.losses import LossInputs, LossStatistics, policy_loss
from astraflow_trainer.step.losses.statistics import SUMS


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


def test_the_percentile_of_the_ratio_is_within_half_a_percent_and_never_above_the_largest() -> None:
    drawn = torch.randn(5000, generator=torch.Generator().manual_seed(3)) * 0.3
    for log_ratio in (drawn, drawn * 40, torch.zeros(7), torch.tensor([0.0, math.inf])):
        ends = {
            "ratio": log_ratio.exp().max(),
            "negative_ratio": torch.zeros(()),
            "abs_log_ratio": torch.ones(()),
        }
        sums = dict.fromkeys(SUMS, torch.tensor(1.0))
        found = LossStatistics.of(sums=sums, maxima=ends, log_ratio_N=log_ratio).metrics().ratio_p99
        ordered = log_ratio.nan_to_num().clamp(max=5.12).sort().values
        exact = float(ordered[math.ceil(0.99 * len(ordered)) - 1].exp())
        assert found == pytest.approx(exact, rel=0.0051)
    # A step with such a token is skipped, not ended by an error.
    LossStatistics.of(sums=sums, maxima=ends, log_ratio_N=torch.tensor([math.nan]))


def test_no_token_has_no_metrics() -> None:
    assert LossStatistics.empty().maxima.tolist() == [-math.inf] * 3
    with pytest.raises(ValueError, match="skip the step"):
        LossStatistics.empty().metrics()
