"""What a node offers a workflow whose episodes act in an environment: environments by the names of the recipe.

Invariant: what is made here keeps the bounds of the contract and answers in time, or raises `EnvironmentFailed`. A
workflow names `environments` in its constructor and gets the node's `Environments`.
"""

from collections.abc import Callable
from typing import Protocol

from astraflow.plugins import Environment
from astraflow.recipe.plugin_settings import PluginSettings

__all__ = ["SERVED", "EnvironmentFailed", "Environments"]

SERVED = "served"
"""`served:Name` in a recipe means the environment that the node's settings know by that name."""


class EnvironmentFailed(Exception):
    """Raised when what an episode acts in raised, hung, died or broke its bounds; says which, and in which turn.

    The attempt ends with reason `environment_failed`, and the task is leased again.
    """


class Environments(Protocol):
    """Makes what episodes act in: plug-ins in this process, or sessions of an environment that is served."""

    def maker(self, environment: PluginSettings, *, turn_timeout_s: float) -> Callable[[], Environment]:
        """Check what the recipe names, and return what makes one environment for each episode.

        Its calls raise EnvironmentFailed when the environment raises, floods, or takes longer than `turn_timeout_s`;
        a reset waits for a free session as long as the episode may. Raises PluginError for what can never work,
        MissingCapability when this node does not know the name.
        """
