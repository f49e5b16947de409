"""The filters on what is known of a group."""

from collections.abc import Callable
from typing import Any

import pytest

from astraflow.plugins import Filter, Group, TaskSpec, TrajectorySummary
from astraflow_dataflow.plugins.filters.duplicates import Duplicates
from astraflow_dataflow.plugins.filters.length import Length
from astraflow_dataflow.plugins.filters.metric_range import MetricRange
from astraflow_dataflow.plugins.filters.overlong import Overlong
from astraflow_dataflow.plugins.filters.reward_range import RewardRange


def of(name: str, *values: Any) -> Group:
    """A group whose trajectories have these values of one field."""
    made = [TrajectorySummary(**({"reward": 0.0} | {name: value})) for value in values]
    return Group(task=TaskSpec("t", ()), trajectories=tuple(made))


@pytest.mark.parametrize(
    ("keep", "group", "kept"),
    [
        (Length(min_tokens=2, max_tokens=9), of("num_trainable_tokens", 2, 9), True),
        (Length(min_tokens=2, max_tokens=9), of("num_trainable_tokens", 1, 9), False),
        (Length(max_tokens=9), of("num_trainable_tokens", 5, 10), False),
        (Length(max_tokens=9, max_outside=0.5), of("num_trainable_tokens", 5, 10), True),
        (Length(max_tokens=9, max_outside=0.5), of("num_trainable_tokens", 5, 10, 11), False),
        (Overlong(), of("finish_reason", "length", "stop"), True),
        (Overlong(), of("finish_reason", "length", "stop", "length"), False),
        (Overlong(max_share=0.0), of("finish_reason", "stop", "stop"), True),
        # (n − distinct) / n: 2 of 4 repeat another, 3 of 4 do.
        (Duplicates(), of("response_digest", 1, 1, 2, 2), True),
        (Duplicates(), of("response_digest", 1, 1, 1, 1), False),
        (Duplicates(max_share=0.0), of("response_digest", 1, 2, 1), False),
        (RewardRange(lowest=0.25, highest=0.75), of("reward", 0.0, 0.5), True),
        (RewardRange(lowest=0.25, highest=0.75), of("reward", 0.0, 0.0, 0.5), False),
        (RewardRange(highest=0.75), of("reward", 1.0, 1.0, 0.5), False),
        (RewardRange(), of("reward", -9.0), True),
        (MetricRange(metric="kl", highest=0.1), of("metrics", {"kl": 0.05}, {"kl": 0.15}, {}), True),
        (MetricRange(metric="kl", highest=0.1), of("metrics", {"kl": 0.05}, {"kl": 0.16}), False),
        (MetricRange(metric="kl", lowest=0.1), of("metrics", {}, {"another": 0.0}), True),
    ],
)
def test_a_group_is_kept_or_dropped(keep: Filter, group: Group, kept: bool) -> None:
    assert keep(group) is kept


@pytest.mark.parametrize(
    "made",
    [
        lambda: Length(min_tokens=3, max_tokens=2),
        lambda: RewardRange(lowest=1.0, highest=0.0),
        lambda: MetricRange(metric="kl", lowest=1.0, highest=0.0),
    ],
)
def test_bounds_that_keep_nothing_are_refused(made: Callable[[], Filter]) -> None:
    with pytest.raises(ValueError, match=r"is above .*; lower it"):
        made()
