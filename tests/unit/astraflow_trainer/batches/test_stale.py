"""Tokens of weights that are older than `max_staleness` allows are left out of the loss, or count for less."""

from dataclasses import replace

import numpy as np

from astraflow.plugins import VersionSpan
from astraflow.recipe import BatchSettings
from astraflow_trainer.batches.packing import pack
from astraflow_trainer.batches.stale import corrected
from support.tiny_training import make_row

SPANS = (VersionSpan(2, 3, 4), VersionSpan(3, 5, 6), VersionSpan(5, 6, 8))
ROW = replace(make_row([1, 2], [3, 4, 5, 6]), version_spans=SPANS)


def settings(max_staleness: int = 2, **stale_tokens: object) -> BatchSettings:
    given = {"max_staleness": max_staleness, "stale_tokens": stale_tokens or None}
    return BatchSettings.model_validate(given)


def test_unset_and_fresh_rows_are_trained_on_as_they_are() -> None:
    assert corrected(ROW, base_version=9, settings=settings()) == (ROW, 0)
    # Version 4 is 2 versions old.
    assert corrected(ROW, base_version=6, settings=settings(correction="mask")) == (ROW, 0)


def test_masked_tokens_leave_the_loss_and_its_counts() -> None:
    row, num_stale = corrected(ROW, base_version=9, settings=settings(correction="mask"))
    assert row.loss_mask.tolist() == [False, False, False, False, False, True]
    assert (num_stale, row.num_trained_tokens, row.loss_weights) == (3, 1, None)


def test_reweighted_tokens_count_less_with_each_version_and_stay_counted() -> None:
    row, num_stale = corrected(ROW, base_version=9, settings=settings(correction="reweight", decay=0.5))
    # 9 − 2 = 7: version 4 is 3 versions beyond, 6 is 1, 8 is none.
    assert row.loss_weights is not None
    assert row.loss_weights[2:].tolist() == [0.125, 0.5, 0.5, 1.0]
    assert (num_stale, row.num_trained_tokens) == (3, 4)


def test_what_tokens_count_is_packed_with_them() -> None:
    row, _ = corrected(ROW, base_version=9, settings=settings(correction="reweight", decay=0.5))
    (batch,) = pack([ROW, row], token_budget=64, lane_tokens=16, attention_tokens=96.0)
    counts = {index: batch.loss_weight_N[batch.row_N == index].tolist() for index in (0, 1)}
    assert counts == {0: [1.0] * 4, 1: [0.125, 0.5, 0.5, 1.0]}
    assert batch.loss_weight_N.numpy().dtype == np.float32
