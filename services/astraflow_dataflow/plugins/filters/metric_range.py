"""The filter on a metric that workflows or nodes give trajectories: the mean over those of a group. Pure."""

import math
from statistics import fmean

from astraflow.plugins import Group


class MetricRange:
    """Keeps groups whose mean of a metric is in [lowest, highest], and those without it."""

    def __init__(self, *, metric: str, lowest: float = -math.inf, highest: float = math.inf) -> None:
        if lowest > highest:
            raise ValueError(f"lowest {lowest} is above highest {highest}; lower it")
        self._metric, self._lowest, self._highest = metric, lowest, highest

    def __call__(self, group: Group) -> bool:
        """Return whether the mean is within."""
        values = [item.metrics[self._metric] for item in group.trajectories if self._metric in item.metrics]
        return not values or self._lowest <= fmean(values) <= self._highest
