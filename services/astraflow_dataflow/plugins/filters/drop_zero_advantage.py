"""The filter behind dynamic sampling.

A group whose rewards are all equal teaches nothing where its own mean is subtracted. Where the recipe compares the
rows of a role with others, or with earlier steps, such a group is kept. Pure. With it the server leases more groups
than a step needs, by the measured acceptance.
"""

from collections.abc import Mapping

from astraflow.plugins import Group
from astraflow.recipe.advantage import AdvantageSettings
from astraflow.recipe.plugin_settings import PluginSettings

# Rewards closer than this are equal: their advantages are rounding noise that normalisation would blow up.
_TOLERANCE = 1e-8


class DropZeroAdvantage:
    """Drops groups of equal rewards, those of one included, whose advantages are sure to be 0.

    An advantage that is a plug-in is taken to give 0 to equal rewards.
    """

    def __init__(self, advantages: Mapping[str, AdvantageSettings | PluginSettings] | None = None) -> None:
        """`advantages` are those of the trained roles; a role that is not there has GRPO's."""
        self._advantages = advantages or {}

    def __call__(self, group: Group) -> bool:
        """Return whether the trainer would make anything of the group."""
        rewards = group.rewards
        if max(rewards) - min(rewards) > _TOLERANCE:
            return True
        advantage = self._advantages.get(group.role)
        return isinstance(advantage, AdvantageSettings) and not advantage.is_zero(
            rewards[0], num_rows=len(rewards)
        )
