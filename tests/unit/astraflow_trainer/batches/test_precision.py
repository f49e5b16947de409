"""Log-probs that an engine rounded to bf16 are noticed, and what that does to ratios is measured."""

from dataclasses import replace

import numpy as np
import torch
from structlog.testing import capture_logs

from astraflow_trainer.batches.precision import LogprobPrecision
from astraflow_trainer.batches.rows import TrainingRow
from support.tiny_training import make_rows


def _rounded(row: TrainingRow) -> TrainingRow:
    logprobs = torch.from_numpy(row.behavior_logprobs).bfloat16().float().numpy()
    return replace(row, behavior_logprobs=logprobs)


def test_rounded_log_probs_are_warned_of_once() -> None:
    precision, rows = LogprobPrecision(), [_rounded(row) for row in make_rows()]
    with capture_logs() as lines:
        assert precision.look(rows)
        assert precision.look(rows)
    assert [line["event"] for line in lines] == ["batch.logprobs_are_bf16"]


def test_one_exact_log_prob_or_too_few_rounded_ones_say_that_nothing_was_rounded() -> None:
    exact, *others = make_rows()
    assert not LogprobPrecision().look([exact, *map(_rounded, others)])
    assert not LogprobPrecision().look([_rounded(exact)])
    assert not LogprobPrecision().look([])


def test_rounding_moves_ratios_by_a_256th_of_the_log_prob_at_most() -> None:
    logprobs = -np.random.default_rng(0).exponential(2.0, 100_000).astype(np.float32)
    rounded = torch.from_numpy(logprobs).bfloat16().float().numpy()
    error = np.abs(np.expm1(logprobs - rounded))
    assert (error <= np.expm1(np.abs(logprobs) / 256) + 1e-6).all()
    # The clip range of GSPO is 3e-4.
    assert (error > 3e-4).mean() > 0.5
