"""Replay by priority: which groups of a batch teach most. Pure; called by batching when a step was trained."""

from itertools import groupby
from statistics import fmean, pstdev

from astraflow.dataflow.v1 import batch_pb2


def priorities(batch: batch_pb2.Batch) -> dict[str, float]:
    """Return the mean |advantage| of each group that is new: mean |reward - mean| over the standard deviation, or 0."""
    fresh = sorted((item for item in batch.items if not item.use), key=lambda item: item.group_id)
    return {
        group_id: _mean_advantage([item.reward for item in items])
        for group_id, items in groupby(fresh, key=lambda item: item.group_id)
    }


def _mean_advantage(rewards: list[float]) -> float:
    mean, deviation = fmean(rewards), pstdev(rewards)
    return fmean(abs(reward - mean) for reward in rewards) / deviation if deviation else 0.0
