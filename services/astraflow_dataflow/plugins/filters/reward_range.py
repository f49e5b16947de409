"""The filter on the mean reward of a group: neither too easy nor too hard. Pure."""

import math
from statistics import fmean

from astraflow.plugins import Group


class RewardRange:
    """Keeps groups whose mean reward is in [lowest, highest]."""

    def __init__(self, *, lowest: float = -math.inf, highest: float = math.inf) -> None:
        if lowest > highest:
            raise ValueError(f"lowest {lowest} is above highest {highest}; lower it")
        self._lowest, self._highest = lowest, highest

    def __call__(self, group: Group) -> bool:
        """Return whether the mean is within."""
        return self._lowest <= fmean(group.rewards) <= self._highest
