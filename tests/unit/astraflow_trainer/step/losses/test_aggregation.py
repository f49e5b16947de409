"""Each way of averaging, as weights computed by hand."""

import pytest
import torch

from astraflow_trainer.step.losses import Aggregation, LossSettings, StepCounts, token_weights


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        (Aggregation.TOKEN_MEAN, [1 / 10, 1 / 10]),
        (Aggregation.SEQ_MEAN_TOKEN_MEAN, [1 / (2 * 4), 1 / (8 * 4)]),
        (Aggregation.SEQ_MEAN_TOKEN_SUM, [1 / 4, 1 / 4]),
        (Aggregation.CONSTANT, [1 / (4 * 100), 1 / (4 * 100)]),
    ],
)
def test_weights_use_global_counts(aggregation: Aggregation, expected: list[float]) -> None:
    settings = LossSettings(aggregation=aggregation, constant_length=100)
    weights = token_weights(
        torch.tensor([2, 8]), counts=StepCounts(num_tokens=10, num_rows=4), settings=settings
    )
    assert weights.tolist() == pytest.approx(expected)
