"""The `Environments` of one run: what a recipe names, checked when the workflow is made.

Invariant: `served:Name` is looked up in the node's settings, anything else is a plug-in that was made once before the
node joins. Made by `recipe_code`, offered to the workflow that names `environments`.
"""

from collections.abc import Callable
from typing import cast

from astraflow.environments import SERVED
from astraflow.errors import PluginError
from astraflow.plugins import Environment
from astraflow.recipe.plugin_settings import PluginSettings
from astraflow_kit.plugins import RecipeSource, make, resolve
from astraflow_raas.environments.local import LocalEnvironment
from astraflow_raas.environments.served import ServedEnvironments


class RecipeEnvironments:
    """See `astraflow.environments.Environments`."""

    def __init__(self, source: RecipeSource, *, served: ServedEnvironments) -> None:
        self._source = source
        self._served = served

    def maker(self, environment: PluginSettings, *, turn_timeout_s: float) -> Callable[[], Environment]:
        """What makes one for each episode. Raises PluginError, MissingCapability."""
        where, _, name = environment.use.partition(":")
        if where != SERVED:
            return self._local(environment, turn_timeout_s=turn_timeout_s)
        if environment.settings:
            raise PluginError(
                f"environment {environment.use!r} takes no settings in a recipe (got "
                f"{', '.join(environment.settings)}); give them where it is served: astraflow environment --with"
            )
        self._served.require(name)
        return lambda: self._served.open(name, turn_timeout_s=turn_timeout_s)

    def _local(self, plugin: PluginSettings, *, turn_timeout_s: float) -> Callable[[], Environment]:
        found, settings = resolve(plugin, protocol=Environment, source=self._source)
        if not isinstance(found, type):
            raise PluginError(
                f"environment {plugin.use!r} is one object; name a class, each episode gets its own"
            )
        spare = [make(plugin, protocol=Environment, source=self._source)]

        def fresh() -> Environment:
            return spare.pop() if spare else cast("Environment", found(**settings))

        return lambda: LocalEnvironment(fresh, name=plugin.use, turn_timeout_s=turn_timeout_s)
