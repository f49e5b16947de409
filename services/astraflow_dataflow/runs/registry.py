"""Runs as this process knows them: recipe, plug-ins, newest versions and wake-ups, loaded once per run.

A run's recipe and code never change, so a context stays valid as long as the process; everything that changes lives in
Redis. Any server process can serve any run. Used by every servicer.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from weakref import WeakValueDictionary

from astraflow.blobs import blob_prefix
from astraflow.dataflow.v1 import run_pb2
from astraflow.errors import NotFoundError, PluginError, PreconditionError, UnavailableError
from astraflow.recipe import Recipe
from astraflow.recipe.dataflow import ArchiveSettings, BatchSettings
from astraflow.recipe.file import LoadedRecipe, parse_recipe
from astraflow.recipe_changes import new_settings, plugin_changes
from astraflow_dataflow.rules.faults import PluginFaults
from astraflow_dataflow.rules.groups import Rules
from astraflow_dataflow.rules.routes import verdict_of
from astraflow_dataflow.rules.window import Admission, Window
from astraflow_dataflow.runs import background
from astraflow_dataflow.runs.data_plugins import DataPlugins
from astraflow_dataflow.runs.leased import LeasedTasks
from astraflow_dataflow.runs.lengths import Lengths
from astraflow_dataflow.runs.sameness import require_same
from astraflow_dataflow.runs.unreadable import reading
from astraflow_dataflow.settings import PluginLimits
from astraflow_dataflow.store.connection import Connection
from astraflow_dataflow.store.store import Store
from astraflow_dataflow.store.wakeups import EventReader, Wakeups
from astraflow_kit.log import get_logger
from astraflow_kit.plugins import RecipeSource
from astraflow_kit.recipe_code import install_code, read_bundle

log = get_logger(__name__)

_PATIENCE_S = 3.0
"""A run whose plug-ins take longer when it is loaded is served without them meanwhile."""
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 1.0, 60.0


@dataclass(eq=False)
class RunContext:
    """One run in this process."""

    run: run_pb2.Run
    """As stored when it was loaded; its state moves on."""
    recipe: Recipe
    faults: PluginFaults = field(default_factory=PluginFaults)
    """Of its plug-ins, also of those that are not made yet."""
    switch: int = 0
    """Number of the switch of plug-ins that recipe, plug-ins and rules are of; 0 as the run was created."""
    skipped: int = 0
    """Tasks that curators skipped since they last proposed one."""
    is_idle: bool = False
    """Nothing in the run is due before something else happens; its run loop says so."""
    newest_versions: dict[str, int] = field(default_factory=dict)
    """Newest announced version of each policy, -1 before the first; refreshed on `version` events and on demand."""
    lengths: Lengths = field(default_factory=Lengths)
    """How long the tasks of each source are, of what this process has settled."""
    leased: LeasedTasks = field(default_factory=LeasedTasks)
    """Tasks that this process leased."""
    data_incarnation: str = ""
    """Identity of the Redis data set and process; read again after each outage."""
    wakeups: Wakeups = field(default_factory=Wakeups)
    seal_key: str = field(default="", repr=False)
    """Seals the credentials and leases of the run; a secret."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    """Background work of the run in this process; ends with the registry."""
    switching: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while other plug-ins are made."""
    made: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there are plug-ins."""
    _made: tuple[DataPlugins, Rules] | None = None

    @property
    def is_made(self) -> bool:
        """Whether its plug-ins are made."""
        return self.made.is_set()

    @property
    def plugins(self) -> DataPlugins:
        """The plug-ins. Raises UnavailableError while they are made."""
        return self._require_made()[0]

    @property
    def rules(self) -> Rules:
        """What complete tasks are judged by. Raises UnavailableError while the plug-ins are made."""
        return self._require_made()[1]

    def take(self, plugins: DataPlugins, recipe: Recipe, *, switch: int = 0) -> None:
        """Go on with these plug-ins."""
        self._made = plugins, plugins.rules(recipe.dataflow)
        self.recipe, self.switch = recipe, switch
        self.made.set()

    def _require_made(self) -> tuple[DataPlugins, Rules]:
        if self._made is None:
            raise UnavailableError(
                f"the plug-ins of run {self.run_id} are not made yet; `astraflow why` says what they do",
                retry_after_s=1.0,
            )
        return self._made

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.run.run_id

    @property
    def policy_ids(self) -> tuple[str, ...]:
        """The run's policies in recipe order."""
        return tuple(self.recipe.policies)

    @cached_property
    def blob_prefix(self) -> str:
        """Where the run's blobs lie in its store."""
        return blob_prefix(self.run.store_uri, self.run_id)

    @cached_property
    def trained_roles(self) -> Mapping[str, str]:
        """The policy of each role that is trained."""
        return trained_roles(self.recipe)

    @property
    def newest_trained(self) -> dict[str, int]:
        """Newest announced version of each policy that is trained and has one, in the recipe's order."""
        newest = {policy_id: self.newest_versions.get(policy_id, -1) for policy_id in self.trained_policies}
        return {policy_id: version for policy_id, version in newest.items() if version >= 0}

    @cached_property
    def trained_policies(self) -> tuple[str, ...]:
        """The policies that are trained, in the recipe's order."""
        return tuple(policy_id for policy_id in self.policy_ids if self.recipe.policy(policy_id).train)

    def require_policy(self, policy_id: str) -> None:
        """Raise NotFoundError unless the run trains the policy."""
        if policy_id not in self.recipe.policies:
            raise NotFoundError(
                f"run {self.run_id} has no policy {policy_id!r}; it has {', '.join(self.policy_ids)}"
            )


class RunRegistry:
    """The run contexts of this process. `code_dir` is where the code of recipes is written, if it may be run; `limits`
    are those of foreign plug-ins.
    """

    def __init__(self, store: Store, *, code_dir: Path, allow_code: bool, limits: PluginLimits) -> None:
        self._store = store
        self._code_dir = code_dir
        self._allow_code = allow_code
        self._limits = limits
        self._contexts: dict[str, RunContext] = {}
        self.on_loaded: Callable[[RunContext], None] = lambda _: None
        """Called once with each context when it is loaded: starts the run's background work."""
        self.on_forgotten: Callable[[str], None] = lambda _: None
        """Called with each run that was deleted."""
        self._locks = WeakValueDictionary[str, asyncio.Lock]()
        """Of runs that are being loaded: one whose plug-ins hang holds up no other."""
        self._parsing = asyncio.Lock()

    async def create(self, run: run_pb2.Run) -> run_pb2.Run:
        """Validate recipe and plug-ins, then create the run. Raises RecipeError, PluginError, ConflictError."""
        recipe = await self._parsed(run)
        # Also where it may not be run: nodes and trainers are given it as it is here.
        read_bundle(run.code, remedy="load the recipe again and create the run anew")
        require_installed(recipe.dataflow.archive)
        faults = PluginFaults()
        made = await self._plugins(run, recipe, faults=faults)
        try:
            stored = await self._store.runs.create(
                run,
                admission=admission_of(recipe),
                archive=archived_by(recipe),
            )
            async with self._parsing:
                await asyncio.to_thread(require_same, stored, asked=run)
            await self._get(run.run_id, made=made)
        finally:
            if (context := self._contexts.get(run.run_id)) is None or context.faults is not faults:
                await made.close()
        return stored

    async def resolve(self, run_id: str) -> str:
        """Return `run_id`, or the only run's id when it is empty. Raises NotFoundError, PreconditionError."""
        if run_id:
            return run_id
        ids = await self._store.runs.ids(limit=2)
        if not ids:
            raise NotFoundError("this server has no run yet; create one first")
        if len(ids) > 1:
            raise PreconditionError("this server has several runs; name one (ListRuns shows them)")
        return ids[0]

    async def get(self, run_id: str) -> RunContext:
        """Return the context of a run, loading it on first use. Raises NotFoundError."""
        return await self._get(await self.resolve(run_id))

    async def _get(self, run_id: str, *, made: DataPlugins | None = None) -> RunContext:
        if run_id not in self._contexts:
            async with self._locks.setdefault(run_id, asyncio.Lock()):
                if run_id not in self._contexts:
                    self._contexts[run_id] = await self._load(run_id, made)
        return self._contexts[run_id]

    async def seal_key(self, run_id: str) -> str:
        """Return the key that seals credentials and leases of a run. Raises NotFoundError."""
        return (await self.get(run_id)).seal_key

    async def forget(self, run_id: str) -> None:
        """Drop a deleted run: its background work ends, and whoever waits looks again and finds it gone."""
        context = self._contexts.pop(run_id, None)
        if context is None:
            return
        log.info("run.forgotten", run_id=run_id)
        self.on_forgotten(run_id)
        await self._end(context)
        context.wakeups.wake_all()

    async def look_again(self, lost: Connection) -> None:
        """A Redis may have lost writes: refresh the contexts of its runs."""
        for context in self.loaded():
            if self._store.connection.home(context.run_id) is lost:
                await self._after_outage(context)

    def known(self, run_id: str) -> RunContext | None:
        """Return the context of a run if this process has it: of one that is being deleted, say."""
        return self._contexts.get(run_id)

    def loaded(self) -> list[RunContext]:
        """Return the contexts this process has."""
        return list(self._contexts.values())

    async def close(self) -> None:
        """End the background work of all runs."""
        await asyncio.gather(*map(self._end, self._contexts.values()))

    async def switch(self, run_id: str, recipe_yaml: str, *, by: str) -> None:
        """Go on with the plug-ins of another recipe, from the end of the step in hand on. Raises RecipeError,
        PluginError, and ConflictError where it differs in anything else.
        """
        context, run = await self.get(run_id), await self._store.runs.get(run_id)
        source = f"new recipe of run {run.run_id}"
        recipe = await self._parsed(run_pb2.Run(run_id=run.run_id, recipe_yaml=recipe_yaml))
        newest = run.switched_recipe_yaml or run.recipe_yaml
        before = await self._parsed(run_pb2.Run(run_id=run.run_id, recipe_yaml=newest))
        if changes := plugin_changes(before, recipe):
            tried = await self._plugins(run, recipe, faults=PluginFaults(), source=source, text=recipe_yaml)
            await tried.close()
            await self._store.runs.switch_plugins(
                run.run_id, recipe_yaml, archive=archived_by(recipe), changes=changes, by=by
            )
        await self.refresh_plugins(context)

    async def refresh_plugins(self, context: RunContext) -> None:
        """Have the plug-ins that hold now; a Redis that lost a switch goes back to those before. Raises NotFoundError,
        and PluginError when this process cannot make them.
        """
        number = await self._store.runs.switch(context.run_id)
        if number == context.switch or not context.is_made:
            return
        async with context.switching:
            if number != context.switch:
                await self._switch(context, number)

    async def _switch(self, context: RunContext, number: int) -> None:
        text = context.run.recipe_yaml
        if number:
            text = await self._store.runs.switched_recipe(context.run_id, number)
        created = await self._parsed(context.run)
        recipe = await self._parsed(run_pb2.Run(run_id=context.run_id, recipe_yaml=text))
        before = context.plugins
        plugins = await self._plugins(
            context.run,
            recipe,
            faults=context.faults,
            source=f"recipe of run {context.run_id}, switch {number}",
            text=text,
            before=before,
            created=created,
        )
        context.take(plugins, recipe, switch=number)
        if plugins.foreign is not before.foreign:
            await before.close()
        log.info("run.switched", run_id=context.run_id, switch=number)

    async def refresh_versions(self, context: RunContext) -> None:
        """Read the newest announced version of each policy."""
        for policy_id in context.policy_ids:
            newest = await self._store.versions.newest(context.run_id, policy_id)
            context.newest_versions[policy_id] = -1 if newest is None else newest

    async def _load(self, run_id: str, made: DataPlugins | None) -> RunContext:
        with reading(run_id):
            run = await self._store.runs.get(run_id)
        read = await self._read(run)
        if added := new_settings(read):
            taken = {".".join(keys): value for keys, value in added.items()}
            log.info("run.new_settings", run_id=run_id, taken=taken)
        recipe = read.recipe
        context = RunContext(run=run, recipe=recipe, faults=made.faults if made else PluginFaults())
        if made is None:
            making = asyncio.create_task(self._plugins(run, recipe, faults=context.faults))
            done, _ = await asyncio.wait({making}, timeout=_PATIENCE_S)
            made = making.result() if done else None
        if made is None:
            work = partial(self._make_late, context, making)
            context.tasks.append(background.start(work, name="plugins", run_id=run_id))
        else:
            context.take(made, recipe)

        try:
            await self._follow(context)
        except BaseException:
            await self._end(context)
            raise
        self.on_loaded(context)
        log.info(
            "run.loaded",
            run_id=run_id,
            life=run_pb2.RunState.Name(run.state).removeprefix("RUN_STATE_").lower(),
        )
        return context

    async def _follow(self, context: RunContext) -> None:
        """Read what the run is at now, and follow its events."""

        async def after_outage() -> None:
            await self._after_outage(context)

        run_id = context.run_id
        with reading(run_id):
            await self.refresh_plugins(context)
        reader = EventReader(self._store.audits, run_id, context.wakeups, after_outage=after_outage)
        await reader.start()
        with reading(run_id):
            await self.refresh_versions(context)
        context.data_incarnation = await self._store.connection.data_incarnation(run_id)
        context.seal_key = await self._store.runs.seal_key(run_id)
        context.tasks.append(background.start(reader.run, name="events", run_id=run_id))

    async def _end(self, context: RunContext) -> None:
        """End the background work of a run, and the process of its plug-ins."""
        ending = [task for task in context.tasks if task is not asyncio.current_task()]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        if context.is_made:
            await context.plugins.close()

    async def _make_late(self, context: RunContext, making: asyncio.Task[DataPlugins]) -> None:
        """Take plug-ins that are made slowly, or that must be made again: the run waits, and says for what."""
        backoff_s = _FIRST_BACKOFF_S
        while not context.is_made:
            try:
                context.take(await making, context.recipe)
            except PluginError as error:
                context.faults.note("dataset", context.recipe.run.data_name, error)
                log.error("run.plugins_not_made", message=error.message, retry_s=backoff_s)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
                making = asyncio.create_task(
                    self._plugins(context.run, context.recipe, faults=context.faults)
                )
            except asyncio.CancelledError:
                making.cancel()
                await asyncio.gather(making, return_exceptions=True)
                raise
        await self.refresh_plugins(context)
        context.wakeups.wake_all()

    async def _after_outage(self, context: RunContext) -> None:
        """Look at everything again: events may have been missed, and Redis may have lost its last second."""
        context.seal_key = await self._store.runs.seal_key(context.run_id, ours=context.seal_key)
        await self.refresh_versions(context)
        await self.refresh_plugins(context)
        context.data_incarnation = await self._store.connection.data_incarnation(context.run_id)
        context.wakeups.wake_all()

    async def _parsed(self, run: run_pb2.Run) -> Recipe:
        return (await self._read(run)).recipe

    async def _read(self, run: run_pb2.Run) -> LoadedRecipe:
        """The recipe of a run, read beside the event loop, which a large one would hold up; one after the other."""
        source = f"recipe of run {run.run_id}"
        async with self._parsing:
            return await asyncio.to_thread(parse_recipe, run.recipe_yaml, source=source)

    async def _plugins(
        self,
        run: run_pb2.Run,
        recipe: Recipe,
        *,
        faults: PluginFaults,
        source: str = "",
        text: str = "",
        before: DataPlugins | None = None,
        created: Recipe | None = None,
    ) -> DataPlugins:
        folder = install_code(run.code, into=self._code_dir, allowed=self._allow_code)
        name = source or f"recipe of run {run.run_id}"
        place = RecipeSource(name=name, text=text or run.recipe_yaml, folder=folder)
        return await DataPlugins.isolated(
            recipe, place, self._limits, faults=faults, before=before, created=created
        )


def admission_of(recipe: Recipe) -> Admission:
    """Return what a recipe says of admission."""
    windows = [
        Window(
            policy_id=policy.policy_id,
            frozen=not policy.train,
            external=policy.model.external is not None,
            max_staleness=policy.batches.max_staleness,
            groups_per_step=policy.batches.fresh_groups,
            replay=_replay_line(policy.batches),
            steps=policy.steps,
            barrier=recipe.dataflow.barrier,
            min_acceptance=recipe.dataflow.min_acceptance,
        )
        for policy in recipe.resolved_policies.values()
    ]
    flow = recipe.dataflow
    return Admission(
        windows=windows,
        roles=trained_roles(recipe),
        admit=flow.admit,
        alternate_every_steps=flow.alternate_every_steps or 0,
        max_attempts=flow.max_attempts,
        max_poison=flow.max_poison,
        max_leases=flow.max_leases or 0,
        hedges=flow.hedge is not None,
    )


def archived_by(recipe: Recipe) -> str:
    """Return what a recipe archives, as the functions read it: share, most bytes that wait, reasons."""
    archive = recipe.dataflow.archive
    if archive is None:
        return ""
    routed = [verdict_of(route) for route in recipe.dataflow.routes if route.to == "archive"]
    return " ".join([repr(archive.share), str(archive.max_waiting_mib * 2**20), archive.reasons, *routed])


def require_installed(archive: ArchiveSettings | None) -> None:
    """Raise PreconditionError when a recipe asks for an archive that this server cannot write."""
    if archive is not None and find_spec("pyarrow") is None:
        raise PreconditionError(
            "the recipe asks for an archive (dataflow.archive), and pyarrow is not installed; run `pip install "
            "'astraflow[archive]'` where the dataflow server runs (build its image with `--build-arg ARCHIVE=1`) and "
            "start it again, or take `archive` out of the recipe"
        )


def _replay_line(batches: BatchSettings) -> str:
    replay = batches.replay
    if replay is None:
        return ""
    num_groups = batches.groups_per_step - batches.fresh_groups
    return f"{num_groups} {replay.max_groups} {replay.max_staleness} {replay.max_uses} {replay.order}"


def trained_roles(recipe: Recipe) -> dict[str, str]:
    """Return the policy of each role that is trained."""
    return {role.name: role.policy_id for role in recipe.resolved_roles.values() if role.is_trained}
