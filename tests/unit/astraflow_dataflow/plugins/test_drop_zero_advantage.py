"""Dynamic sampling's filter."""

import pytest

from astraflow_dataflow.plugins.drop_zero_advantage import DropZeroAdvantage
from support.groups import group


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [([0.0, 1.0], True), ([1.0, 1.0], False), ([0.5], False), ([0.1 + 0.2, 0.3], False)],
)
def test_groups_whose_rewards_are_all_equal_are_dropped(rewards: list[float], kept: bool) -> None:
    assert DropZeroAdvantage()(group(*rewards)) is kept
