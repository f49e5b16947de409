"""The plug-ins of a run that the server calls: made once per process, called with their states loaded and saved.

A call reads the newest state, runs, and saves what it changed, all or nothing; when another server changed the
state meanwhile it is read again and the call repeated. So each saved change was made from the newest state, and a
killed server loses at most the call it was in. Made by the registry; called by settling, curation and binding.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from astraflow.errors import UnavailableError
from astraflow.plugins import Curator, Dataset, Filter, Group, PluginState, Selector
from astraflow.recipe import Recipe
from astraflow.recipe.plugin_settings import PluginSettings
from astraflow_dataflow.rules.faults import PluginFaults
from astraflow_dataflow.rules.groups import Rules
from astraflow_dataflow.store.plugin_states import PluginStateStore, StateChange
from astraflow_kit.plugins import RecipeSource, make

P = TypeVar("P")
T = TypeVar("T")

_TRIES = 16
_LONGEST_PAUSE_S = 0.2
_MOST_UNOBSERVED = 4096


@dataclass(kw_only=True)
class DataPlugin(Generic[P]):
    """One plug-in of a run; `name` is what the recipe calls it, with `#2` for its second mention."""

    kind: str
    name: str
    made: P
    state: PluginState | None = None
    """None when its constructor takes none."""
    revision: int = 0
    """Of the state, as this process has it."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is called with its state."""

    @property
    def state_name(self) -> str:
        """What its state is called in Redis."""
        return f"{self.kind} {self.name}"


@dataclass(kw_only=True)
class DataPlugins:
    """The data plug-ins of one run in this process."""

    dataset: Dataset
    filters: tuple[DataPlugin[Filter], ...] = ()
    curators: tuple[DataPlugin[Curator], ...] = ()
    selector: DataPlugin[Selector] | None = None
    faults: PluginFaults = field(default_factory=PluginFaults)
    unobserved: asyncio.Queue[Group] = field(default_factory=lambda: asyncio.Queue(_MOST_UNOBSERVED))
    """Complete groups that curators have not observed yet."""

    @classmethod
    def make(cls, recipe: Recipe, source: RecipeSource) -> DataPlugins:
        """Make what the recipe names. Raises PluginError."""
        flow, seed, names = recipe.dataflow, recipe.run.seed, Counter[tuple[str, str]]()
        advantages = recipe.advantages

        def made(kind: str, settings: PluginSettings, protocol: type[P]) -> DataPlugin[P]:
            names[kind, settings.use] += 1
            number = names[kind, settings.use]
            state = PluginState()
            offered = {"seed": seed, "state": state, "advantages": advantages}
            plugin = make(settings, protocol=protocol, source=source, **offered)
            name = settings.use if number == 1 else f"{settings.use}#{number}"
            # Its constructor named the state, and so was given one; a function or an object was not.
            kept = state if "state" in inspect.signature(type(plugin).__init__).parameters else None
            return DataPlugin(kind=kind, name=name, made=plugin, state=kept)

        return cls(
            dataset=make(recipe.run.dataset, protocol=Dataset, source=source, seed=seed),
            filters=tuple(made("filter", settings, Filter) for settings in flow.filters),
            curators=tuple(made("curator", settings, Curator) for settings in flow.curators),
            selector=made("selector", flow.selector, Selector) if flow.selector else None,
        )

    def rules(self, *, min_members: int | None) -> Rules:
        """Return what complete tasks are judged by."""
        filters = tuple((plugin.name, plugin.made) for plugin in self.filters)
        return Rules(min_members=min_members, filters=filters, faults=self.faults)


async def with_states(
    store: PluginStateStore,
    run_id: str,
    plugins: Sequence[DataPlugin[P]],
    work: Callable[[], Awaitable[T]],
) -> T:
    """Return what `work` does, which calls the plug-ins, with their states loaded before and saved after it.

    Raises UnavailableError when other servers keep changing them, or Redis is away; then nothing was saved.
    """
    stateful = [(plugin, plugin.state) for plugin in plugins if plugin.state is not None]
    if not stateful:
        return await work()
    async with AsyncExitStack() as held:
        for plugin, _ in stateful:
            await held.enter_async_context(plugin.lock)
        for number in range(_TRIES):
            revisions = await store.revisions(run_id, [plugin.state_name for plugin, _ in stateful])
            for (plugin, state), revision in zip(stateful, revisions, strict=True):
                if plugin.revision != revision or state.changes():
                    state.replace(await store.entries(run_id, plugin.state_name))
                    plugin.revision = revision
            result = await work()
            changed = [(plugin, state) for plugin, state in stateful if state.changes()]
            changes = [
                StateChange(name=plugin.state_name, revision=plugin.revision, entries=state.changes())
                for plugin, state in changed
            ]
            if not changes or await store.save(run_id, changes):
                for plugin, state in changed:
                    state.saved()
                    plugin.revision += 1
                return result
            # By chance, and longer each time: the other server is not met again at the same moment.
            await asyncio.sleep(random.uniform(0, _LONGEST_PAUSE_S) * number / _TRIES)
    raise UnavailableError(
        f"other servers keep changing the state of a plug-in of {run_id}", retry_after_s=0.2
    )
