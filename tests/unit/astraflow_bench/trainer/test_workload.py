"""What the benchmark trains on has the shape that its page says, and every row of it counts."""

import numpy as np
import pytest

from astraflow_bench.trainer import workload
from astraflow_bench.trainer.sizes import TrainerSizes
from astraflow_trainer.model.model import PolicyModel, build_causal_lm
from astraflow_trainer.step.step import Outcome, StepSettings, train_step

TINY = TrainerSizes(
    hidden=64, layers=1, rows=12, median=8, outlier=64, turns=1, logit_tokens=512, logit_vocab=4096, logit_hidden=16,
    ranks=(1, 2), steps=2,
)  # fmt: skip


def test_the_longest_geometric_rows_are_six_times_the_middle_one() -> None:
    lengths = workload.geometric_lengths(48, median=48)
    middle, long = np.quantile(lengths, (0.5, 0.99), method="higher")
    assert abs(middle - 48) <= 2
    assert long / middle >= 6
    assert lengths == workload.geometric_lengths(48, median=48)
    assert lengths != sorted(lengths)


def test_one_row_is_long() -> None:
    lengths = workload.outlier_lengths(12, median=8, outlier=64)
    assert sorted(lengths) == [8] * 11 + [64]


@pytest.mark.parametrize("num_rows", [8, 10, 13])
def test_every_row_is_trained_on(num_rows: int) -> None:
    shape = workload.model_shape(TINY)
    policy = PolicyModel(build_causal_lm(shape, seed=0)).train()
    rows = workload.rows_of(workload.geometric_lengths(num_rows, median=6))
    optimizer = workload.optimizer_of(policy)
    metrics = train_step(policy, optimizer=optimizer, rows=rows, settings=StepSettings())
    assert metrics.outcome is Outcome.COMMITTED
    assert metrics.num_trained_rows == num_rows


def test_methods_that_differ_are_an_error() -> None:
    workload.same_numbers([1.0, 1.0005], what="the gradient")
    with pytest.raises(AssertionError, match=r"the gradient differs between the methods: \[1.0, 1.1\]"):
        workload.same_numbers([1.0, 1.1], what="the gradient")
