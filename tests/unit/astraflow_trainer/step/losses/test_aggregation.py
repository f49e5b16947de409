"""Each way of averaging, as weights computed by hand."""

import pytest
import torch

from astraflow.recipe.algorithm import Aggregation, Constant, SeqMeanTokenMean, SeqMeanTokenSum, TokenMean
from astraflow_trainer.step.losses import StepCounts, token_weights

WEIGHTS = [
    (TokenMean(), [1 / 10, 1 / 10]),
    (SeqMeanTokenMean(), [1 / (2 * 4), 1 / (8 * 4)]),
    (SeqMeanTokenSum(), [1 / 4, 1 / 4]),
    (Constant(length=100), [1 / (4 * 100), 1 / (4 * 100)]),
]


@pytest.mark.parametrize(("aggregation", "expected"), WEIGHTS)
def test_weights_use_global_counts(aggregation: Aggregation, expected: list[float]) -> None:
    counts = StepCounts(num_tokens=10, num_rows=4)
    weights = token_weights(torch.tensor([2, 8]), counts=counts, aggregation=aggregation)
    assert weights.tolist() == pytest.approx(expected)
