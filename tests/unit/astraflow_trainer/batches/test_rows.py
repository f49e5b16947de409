"""Rows that cannot be trained on are refused when they are built."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from astraflow import plugins, trajectories
from support.tiny_training import make_row

SPANS = (plugins.VersionSpan(2, 3, 4), plugins.VersionSpan(3, 4, 5))
ROW = replace(make_row([5, 6], [7, 8], logprobs=[-0.5, -1.5], reward=1.0, name="t1"), version_spans=SPANS)


def test_counts_and_oldest_version_come_from_mask_and_spans() -> None:
    assert (ROW.num_tokens, ROW.num_trained_tokens, ROW.min_version) == (4, 2, 4)


IN_PLACE: dict[str, tuple[list[tuple[int, int, int, bool]], list[int]]] = {
    "one version": ([(2, 8, 4, False)], []),
    "a swap with the old keys and values": ([(2, 4, 4, False), (4, 8, 5, False)], [4, 5, 6, 7]),
    "recomputed at the swap": ([(2, 4, 4, False), (4, 8, 5, True)], []),
    "two swaps, the second recomputed": ([(2, 4, 4, False), (4, 6, 5, False), (6, 8, 6, True)], [4, 5]),
    "one version in two parts": ([(2, 4, 4, False), (4, 6, 5, False), (6, 8, 5, False)], [4, 5, 6, 7]),
    "another call, after an observation": ([(2, 4, 4, False), (5, 8, 5, False)], []),
    "another call, its span from the observation on": ([(2, 5, 4, False), (5, 8, 5, False)], []),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_tokens_that_went_on_over_a_swap_are_known_by_their_spans(name: str) -> None:
    spans, expected = IN_PLACE[name]
    row = make_row([5, 6], [7] * 6)
    if "another" in name:
        row = replace(
            row,
            loss_mask=np.array([0, 0, 1, 1, 0, 1, 1, 1], dtype=bool),
            behavior_logprobs=np.array([0, 0, -1, -1, 0, -1, -1, -1], dtype=np.float32),
        )
    row = replace(row, version_spans=tuple(plugins.VersionSpan(*span) for span in spans))
    assert np.flatnonzero(row.in_place).tolist() == expected
    assert row.num_turns == 1 + ("another" in name)


FROM_THE_FIRST = {"loss_mask": np.array([True] * 4), "version_spans": (plugins.VersionSpan(0, 4, 4),)}
BROKEN_RULES = [
    ({"token_ids": np.array([5, 6, 7], dtype=np.int32)}, "length_mismatch"),
    ({"loss_mask": np.array([True, False, True, True])}, "spans_not_covering"),
    ({"loss_mask": np.zeros(4, dtype=bool)}, "no_trainable_tokens"),
    ({"reward": float("nan")}, "nan_reward"),
    ({"temperature": 0.0}, "bad_temperature"),
    ({"token_ids": np.array([5, -6, 7, 8], dtype=np.int32)}, "token_out_of_range"),
    ({"behavior_logprobs": np.array([0, 0, np.inf, -1], dtype=np.float32)}, "inf_logprob"),
    ({"behavior_logprobs": np.array([0, -1, -1, -1], dtype=np.float32)}, "logprob_outside_mask"),
    ({"version_spans": (plugins.VersionSpan(2, 3, 4),)}, "spans_not_covering"),
    ({"version_spans": (plugins.VersionSpan(2, 5, 4),)}, "bad_spans"),
    ({"version_spans": (plugins.VersionSpan(3, 4, 4), plugins.VersionSpan(2, 3, 4))}, "bad_spans"),
    (FROM_THE_FIRST, "first_token_trained"),
]


@pytest.mark.parametrize(("changes", "slug"), BROKEN_RULES)
def test_a_row_is_refused_by_the_rule_it_breaks(changes: dict[str, Any], slug: str) -> None:
    with pytest.raises(trajectories.BadTrajectory, match=f"{slug}: t1: "):
        replace(ROW, **changes)
