"""Rows that cannot be trained on are refused when they are built."""

from dataclasses import replace

import numpy as np
import pytest

from astraflow.plugins import VersionSpan
from astraflow_trainer.batches.rows import TrainingRow, total_trained_tokens


def _row() -> TrainingRow:
    return TrainingRow(
        trajectory_id="t1",
        group_id="g1",
        token_ids=np.array([5, 6, 7, 8], dtype=np.int32),
        loss_mask=np.array([False, False, True, True]),
        behavior_logprobs=np.array([0, 0, -0.5, -1.5], dtype=np.float32),
        version_spans=(VersionSpan(2, 3, 4), VersionSpan(3, 4, 5)),
        reward=1.0,
        temperature=1.0,
    )


def test_counts_and_oldest_version_come_from_mask_and_spans() -> None:
    row = _row()
    assert (row.num_tokens, row.num_trained_tokens, row.min_version) == (4, 2, 4)
    assert total_trained_tokens([row, row]) == 4


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"token_ids": np.array([5, 6, 7], dtype=np.int32)}, "3 token ids, 4 mask entries, 4 log-probs"),
        ({"loss_mask": np.array([True, False, True, True])}, "first token is marked as trained"),
        ({"loss_mask": np.zeros(4, dtype=bool)}, "no token is trained"),
        ({"reward": float("nan")}, "reward nan is not finite"),
        ({"temperature": 0.0}, "temperature 0.0 must be above 0"),
        ({"token_ids": np.array([5, -6, 7, 8], dtype=np.int32)}, "token id -6 is negative"),
        ({"behavior_logprobs": np.array([0, 0, np.inf, -1], dtype=np.float32)}, "1 log-probs"),
        (
            {"behavior_logprobs": np.array([0, -1, -1, -1], dtype=np.float32)},
            "not generated carries a log-prob",
        ),
        ({"version_spans": (VersionSpan(2, 3, 4),)}, "trained token 3 has no weight version"),
        ({"version_spans": (VersionSpan(2, 5, 4),)}, "out of order or range"),
        ({"version_spans": (VersionSpan(3, 4, 4), VersionSpan(2, 3, 4))}, "out of order or range"),
    ],
)
def test_a_row_that_cannot_be_trained_is_refused_with_the_reason(
    changes: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        replace(_row(), **changes)
