"""The plug-ins of a run that the server calls: made once per process, called with their states loaded and saved.

A call reads the newest state, runs, and saves what it changed, all or nothing; when another server changed the
state meanwhile it is read again and the call repeated. So each saved change was made from the newest state, and a
killed server loses at most the call it was in. Made by the registry; called by settling, curation and binding.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar, cast

from astraflow.errors import UnavailableError
from astraflow.plugins import Curator, Dataset, Filter, Group, PluginState, Selector
from astraflow.recipe import DataflowSettings, Recipe
from astraflow.recipe.plugin_settings import DataPluginSettings
from astraflow_dataflow.rules.faults import PluginFaults
from astraflow_dataflow.rules.groups import Rules
from astraflow_dataflow.rules.shadows import Shadows
from astraflow_dataflow.runs.foreign.process import PluginOrder
from astraflow_dataflow.runs.foreign.proxies import ForeignDataset, ForeignPlugins
from astraflow_dataflow.runs.mixed_dataset import make_dataset, tasks_per_epoch
from astraflow_dataflow.settings import PluginLimits
from astraflow_dataflow.store.plugin_states import PluginStateStore, StateChange
from astraflow_kit.plugins import RecipeSource, make

P = TypeVar("P")
T = TypeVar("T")

_TRIES = 16
_LONGEST_PAUSE_S = 0.2
_MOST_UNOBSERVED = 4096


@dataclass(kw_only=True)
class DataPlugin(Generic[P]):
    """One plug-in of a run; `name` is one of `plugin_names`."""

    kind: str
    name: str
    made: P
    shadow: bool = False
    """Asked, and obeyed by nobody."""
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
    shadows: Shadows = field(default_factory=Shadows)
    unobserved: asyncio.Queue[Group] = field(default_factory=lambda: asyncio.Queue(_MOST_UNOBSERVED))
    """Complete groups that curators have not observed yet."""
    foreign: ForeignPlugins | None = None
    """Those that run in a process of the run."""

    @classmethod
    def make(
        cls,
        recipe: Recipe,
        source: RecipeSource,
        *,
        before: DataPlugins | None = None,
        created: Recipe | None = None,
        dataset: Dataset | None = None,
        foreign: ForeignPlugins | None = None,
        faults: PluginFaults | None = None,
    ) -> DataPlugins:
        """Make what the recipe names, but for the data set given, `foreign` ones, and what is the same as `before`.
        Raises PluginError.

        `created` is the recipe that the run was created with, by which plug-ins of other settings have other names.
        """
        flow, seed = recipe.dataflow, recipe.run.seed
        if foreign and isinstance(there := foreign.find("dataset", recipe.run.data_name), ForeignDataset):
            dataset = there
        dataset = dataset or (before.dataset if before else make_dataset(recipe, source))
        kept = before or cls(dataset=dataset, faults=faults or PluginFaults())
        fresh = None if before and foreign is before.foreign else foreign
        offered = {
            "seed": seed,
            "advantages": recipe.advantages,
            "tasks_per_epoch": tasks_per_epoch(dataset),
        }
        maker = _Maker(before=before, foreign=fresh, source=source, offered=offered)
        first = (created or recipe).dataflow

        def several(
            kind: str,
            wanted: Sequence[DataPluginSettings],
            of_first: Sequence[DataPluginSettings],
            protocol: type[P],
        ) -> tuple[DataPlugin[P], ...]:
            named = zip(plugin_names(wanted, first=of_first), wanted, strict=True)
            return tuple(maker.make(kind, *each, protocol) for each in named)

        selectors = several("selector", _some(flow.selector), _some(first.selector), Selector)
        return replace(
            kept,
            dataset=dataset,
            filters=several("filter", flow.filters, first.filters, Filter),
            curators=several("curator", flow.curators, first.curators, Curator),
            selector=selectors[0] if selectors else None,
            foreign=foreign,
        )

    @classmethod
    async def isolated(
        cls,
        recipe: Recipe,
        source: RecipeSource,
        limits: PluginLimits,
        *,
        faults: PluginFaults,
        before: DataPlugins | None = None,
        created: Recipe | None = None,
    ) -> DataPlugins:
        """Make them off the event loop, foreign ones in a process of their own. Raises PluginError.

        Those of `before` stay open, and are kept where the foreign ones are the same.
        """
        wanted = _foreign(recipe, limits, first=(created or recipe).dataflow)
        foreign, dataset = (before.foreign, before.dataset) if before else (None, None)
        if dataset is None and not any(kind == "dataset" for kind, _, _ in wanted):
            dataset = await asyncio.to_thread(make_dataset, recipe, source)
        started = None
        if wanted != (foreign.names if foreign else []):
            foreign = started = await _started(source, limits, wanted, dataset=dataset, faults=faults)
        made = partial(cls.make, recipe, source, before=before, created=created, dataset=dataset)
        try:
            return await asyncio.to_thread(made, foreign=foreign, faults=faults)
        except BaseException:
            if started is not None:
                await started.close()
            raise

    async def close(self) -> None:
        """End the processes of the foreign ones."""
        if self.foreign is not None:
            await self.foreign.close()

    async def in_thread(self, kind: str, work: Callable[[], T]) -> T:
        """Run what calls plug-ins of a kind: foreign ones in a thread of the run, for they may not return."""
        if self.is_foreign(kind):
            assert self.foreign is not None
            return await self.foreign.hosts[kind].run(work)
        return await asyncio.to_thread(work)

    def is_foreign(self, kind: str) -> bool:
        """Whether any plug-in of a kind is foreign."""
        return self.foreign is not None and kind in self.foreign.hosts

    def of(self, kind: str) -> Sequence[DataPlugin[Any]]:
        """Return the filters, the curators or the selector."""
        every: list[DataPlugin[Any]] = [*self.filters, *self.curators, *_some(self.selector)]
        return [plugin for plugin in every if plugin.kind == kind]

    def rules(self, flow: DataflowSettings) -> Rules:
        """Return what complete tasks are judged by."""
        obeyed, shadows = (
            tuple((plugin.name, plugin.made) for plugin in self.filters if plugin.shadow is shadow)
            for shadow in (False, True)
        )
        return Rules(
            min_members=flow.min_members,
            routes=flow.routes,
            filters=obeyed,
            shadow_filters=shadows,
            faults=self.faults,
            shadows=self.shadows,
        )


@dataclass(frozen=True, kw_only=True)
class _Maker:
    """Where the plug-ins of a run come from."""

    before: DataPlugins | None
    foreign: ForeignPlugins | None
    source: RecipeSource
    offered: Mapping[str, object]

    def make(self, kind: str, name: str, settings: DataPluginSettings, protocol: type[P]) -> DataPlugin[P]:
        """Return what asks a foreign one, else the one before, else another. Raises PluginError."""
        if self.foreign and (there := self.foreign.find(kind, name)):
            proxy = cast("P", there)
            return DataPlugin(kind=kind, name=name, made=proxy, shadow=settings.shadow, state=there.state)
        for known in self.before.of(kind) if self.before else ():
            if known.name == name:
                return replace(known, shadow=settings.shadow)
        state = PluginState()
        plugin = make(settings, protocol=protocol, source=self.source, state=state, **self.offered)
        # Its constructor named the state, and so was given one; a function or an object was not.
        own = state if "state" in inspect.signature(type(plugin).__init__).parameters else None
        return DataPlugin(kind=kind, name=name, made=plugin, shadow=settings.shadow, state=own)


def _foreign(recipe: Recipe, limits: PluginLimits, *, first: DataflowSettings) -> list[tuple[str, str, int]]:
    """Kind, name, and place among those of its kind of each foreign plug-in."""
    run, flow = recipe.run, recipe.dataflow
    sets = [run.dataset] if run.dataset is not None else [part.dataset for part in run.sources.values()]
    found = [("dataset", run.data_name, 0)] if any(limits.is_foreign(each.use) for each in sets) else []
    for kind, wanted, of_first in (
        ("filter", flow.filters, first.filters),
        ("curator", flow.curators, first.curators),
        ("selector", _some(flow.selector), _some(first.selector)),
    ):
        named = enumerate(zip(plugin_names(wanted, first=of_first), wanted, strict=True))
        found += [(kind, name, place) for place, (name, each) in named if limits.is_foreign(each.use)]
    return found


async def _started(
    source: RecipeSource,
    limits: PluginLimits,
    wanted: Sequence[tuple[str, str, int]],
    *,
    dataset: Dataset | None,
    faults: PluginFaults,
) -> ForeignPlugins | None:
    """Start the process of these plug-ins, if there are any. Raises PluginError."""
    if not wanted:
        return None
    told = None if dataset is None else tasks_per_epoch(dataset)
    orders = {
        kind: PluginOrder(
            source=source.name,
            recipe=source.text,
            folder=source.folder,
            plugins=[plugin for plugin in wanted if plugin[0] == kind],
            tasks_per_epoch=told,
        )
        for kind in dict.fromkeys(kind for kind, _, _ in wanted)
    }
    return await ForeignPlugins.start(orders, limits, faults)


def plugin_names(wanted: Sequence[DataPluginSettings], *, first: Sequence[DataPluginSettings]) -> list[str]:
    """Return what plug-ins of one kind are called: as the recipe calls them, with `#2` for a second mention. One with
    other settings than those of the run's `first` recipe has their digest in its name, and so a state of its own.
    """
    known: dict[str, list[str]] = defaultdict(list)
    mentions = Counter[str]()
    for settings in first:
        mentions[settings.use] += 1
        known[_digest(settings)].append(_numbered(settings.use, mentions[settings.use]))
    names, others = [], Counter[str]()
    for settings in wanted:
        digest = _digest(settings)
        if known[digest]:
            names.append(known[digest].pop(0))
        else:
            others[digest] += 1
            names.append(_numbered(f"{settings.use}~{digest}", others[digest]))
    return names


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}#{number}"


def _digest(settings: DataPluginSettings) -> str:
    text = json.dumps([settings.use, settings.settings], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _some(value: T | None) -> tuple[T, ...]:
    return () if value is None else (value,)


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
