"""The filter behind dynamic sampling.

A group whose rewards are all equal teaches nothing, because its advantages are zero. Pure. With it the server
leases more groups than a step needs, by the measured acceptance.
"""

from __future__ import annotations

from astraflow.plugins import Group

# Rewards closer than this are equal: their advantages are rounding noise that normalisation would blow up.
_TOLERANCE = 1e-8


class DropZeroAdvantage:
    """Drops groups whose rewards are all equal, groups of one included."""

    def __call__(self, group: Group) -> bool:
        """Return whether any two rewards differ."""
        rewards = group.rewards
        return max(rewards) - min(rewards) > _TOLERANCE
