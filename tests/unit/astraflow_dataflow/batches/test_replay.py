"""Priorities of replay."""

import pytest

from astraflow.dataflow.v1 import batch_pb2
from astraflow_dataflow.batches.replay import priorities


def test_a_groups_priority_is_its_mean_absolute_advantage() -> None:
    rewards = {"half": [0, 1, 0, 1], "one": [0, 0, 0, 1], "none": [1, 1], "again": [0, 1]}
    items = [
        batch_pb2.BatchItem(group_id=name, reward=reward, use=int(name == "again"))
        for name, values in rewards.items()
        for reward in values
    ]
    # one: mean 1/4, deviation √3/4, so (3 · 1/4 + 3/4) / 4 / (√3/4) = √3/2. Replayed groups have theirs already.
    assert priorities(batch_pb2.Batch(items=items[::-1])) == pytest.approx(
        {"half": 1.0, "one": 3**0.5 / 2, "none": 0.0}
    )
