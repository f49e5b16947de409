"""One pull: from what a mirror holds to a version, one path after the other, repairing on the way.

Invariant: nothing that engines load is written to before all that the change needs is in the journal; a path that
proves bad is gone around, and when none is left the mirror goes back to what it held. `mirror` makes one per call.
"""

from collections.abc import Sequence

from astraflow.errors import AstraflowError
from astraflow_kit import failpoints
from astraflow_kit.log import get_logger
from astraflow_weights.codec.parts.reader import PartSet
from astraflow_weights.errors import Edge, NoPath, VerificationFailed
from astraflow_weights.mirror import checkpoint
from astraflow_weights.mirror.content import Fill, Heal, MirrorContent, require_manifest
from astraflow_weights.mirror.fetching import Fetcher
from astraflow_weights.mirror.journal import Journal
from astraflow_weights.mirror.pull_guard import PullGuard
from astraflow_weights.mirror.state import Holding, MirrorFiles, steps_in
from astraflow_weights.mirror.tile_grid import GridTile, MappedTiles, TileGrid
from astraflow_weights.mirror.tile_repair import fetch_repair, plan_repair
from astraflow_weights.mirror.tile_steps import kind_of, steps_of
from astraflow_weights.settings import MirrorSettings
from astraflow_weights.store import ObjectStore
from astraflow_weights.versions.history import VersionRecord
from astraflow_weights.versions.log import VersionLog
from astraflow_weights.versions.manifest import Manifest
from astraflow_weights.versions.planner import PullPlan, plan_pull
from astraflow_weights.versions.pull import PullCounts, check_size
from astraflow_weights.versions.rates import MeasuredRates

log = get_logger(__name__)


class MirrorPull:
    """From one store and log to one version. The caller is the only puller of the folder, under the guard."""

    def __init__(
        self,
        store: ObjectStore,
        log_reader: VersionLog,
        record: VersionRecord,
        *,
        files: MirrorFiles,
        journal: Journal,
        content: MirrorContent,
        settings: MirrorSettings,
        guard: PullGuard,
        rates: MeasuredRates,
    ) -> None:
        self._store = store
        self._log = log_reader
        self._record = record
        self._files = files
        self._journal = journal
        self._content = content
        self._settings = settings
        self._guard = guard
        self._rates = rates
        self.counts = PullCounts()
        """What was fetched."""

    def prefetch(self) -> None:
        """Bring what the cheapest plan needs into the journal, if there is something to start from."""
        if self.base is None or self.is_here:
            return
        manifest = self._log.manifest(self._record.version)
        plan = self._plan(held=self.base, target=self._record.version, avoid=frozenset())
        fetcher = self._fetcher(manifest)
        try:
            self._fetch(fetcher, plan, manifest=manifest)
        finally:
            self.counts += fetcher.received.counts

    def run(self) -> tuple[int | None, frozenset[Edge]]:
        """Try one path after the other; the version it began with, and what was rejected."""
        rejected: frozenset[Edge] = frozenset()
        for paths_left in range(self._settings.max_repairs, -1, -1):
            try:
                return self._attempt(rejected), rejected
            except VerificationFailed as failure:
                rejected |= failure.edges
                base = self.base
                another = self._plan_if_any(held=base, avoid=rejected)
                if not paths_left or not failure.edges or another is None:
                    self._go_back(rejected)
                    raise
        raise AssertionError("the last path returns or raises")

    def _attempt(self, avoid: frozenset[Edge]) -> int | None:
        """Carry out one plan; returns the version it began with. Raises VerificationFailed."""
        self._mend(avoid)
        if self.is_here:
            self._journal.clear()
            return self._record.version
        manifest = self._log.manifest(self._record.version)
        base = self.base
        plan = self._plan(held=base, target=self._record.version, avoid=avoid)
        fetcher = self._fetcher(manifest)
        to = _holding(self._record)
        try:
            if self._in_place(manifest):
                sets = self._fetch(fetcher, plan, manifest=manifest)
                failpoints.hit("weights.mirror.fetched")
                heal = self._heal(avoid, limit_bytes=None)
                took_s = self._content.apply(sets, plan.steps, to=to, manifest=manifest, heal=heal)
                self._learn(plan, took_s=took_s)
            else:
                self._build(fetcher, plan, to=to, manifest=manifest)
        finally:
            self.counts += fetcher.received.counts
        self._journal.clear()
        return plan.held

    def _plan(self, *, held: int | None, target: int, avoid: frozenset[Edge]) -> PullPlan:
        """The cheapest plan; its parts are protected while it is carried out. Raises NoPath."""
        return self._guard.plan(
            lambda avoided: self._cheapest(held=held, target=target, avoid=avoided), avoid=avoid
        )

    def _cheapest(self, *, held: int | None, target: int, avoid: frozenset[Edge]) -> PullPlan:
        return plan_pull(self._log, held=held, target=target, avoid=avoid, costs=self._rates.costs())

    def _mend(self, avoid: frozenset[Edge]) -> None:
        """End a change that was interrupted and repair damage, as far as that is cheaper than starting anew."""
        content, state = self._content, self._content.state
        if content.held is None or state is None or not self._is_in(content.held.holding):
            return
        anew = self._plan_if_any(held=None, avoid=avoid)
        heal = self._heal(avoid, limit_bytes=anew.size_bytes if anew is not None else None)
        try:
            if state.applying is not None and avoid.isdisjoint(
                step.edge for step in steps_in(state.applying)
            ):
                content.resume(heal)
            if state.applying is None and not content.is_whole:
                self._repair(heal)
        except (NoPath, _Dearer) as error:
            log.warning("weights.mirror_given_up", version=content.held.holding.version, message=str(error))

    def _learn(self, plan: PullPlan, *, took_s: float) -> None:
        """What applying costs; a plan with both kinds tells nothing of either."""
        kinds = {kind_of(step.edge) for step in plan.steps}
        if len(kinds) == 1:
            self._rates.decoded(kinds.pop(), size_bytes=plan.size_bytes, took_s=took_s)

    def _repair(self, heal: Heal) -> None:
        """Bring back what is held."""
        assert self._content.held is not None
        manifest = self._content.held.manifest
        wrong = [asset for asset in manifest.assets if asset.file_name in self._content.wrong_assets]
        fetcher = self._fetcher(manifest)
        try:
            fetcher.assets(wrong, manifest=manifest)
            self._content.repair(heal)
        finally:
            self.counts += fetcher.received.counts

    def _go_back(self, avoid: frozenset[Edge]) -> None:
        """Nothing leads forward: have again, whole, what was held."""
        held = self._content.held
        if held is None or self._content.is_whole or not self._is_in(held.holding):
            return
        try:
            self._content.verify()
            self._repair(self._heal(avoid, limit_bytes=None))
        except AstraflowError as error:
            # The failure that led here is raised; engines serve from their own memory meanwhile.
            log.error("weights.mirror_damaged", version=held.holding.version, message=error.message)

    def _heal(self, avoid: frozenset[Edge], *, limit_bytes: int | None) -> Heal:
        """How tiles of what is held are fetched anew. The result raises NoPath, _Dearer, and as the store does."""

        def heal(tiles: Sequence[GridTile]) -> Fill:
            assert self._content.held is not None
            held, rejected, threads = self._content.held, avoid, self._settings.fetch_threads
            while True:
                plan = self._plan(held=None, target=held.holding.version, avoid=rejected)
                try:
                    repair = plan_repair(self._store, plan, tiles, threads=threads)
                    if limit_bytes is not None and repair.size_bytes >= limit_bytes:
                        raise _Dearer(f"{len(tiles)} damaged tiles need {repair.size_bytes} bytes")
                    grid = held.tiles.grid
                    steps = fetch_repair(self._store, repair, tiles, grid=grid, threads=threads)
                except VerificationFailed as failure:
                    rejected |= failure.edges
                    continue
                self.counts += PullCounts(repaired_tiles=len(tiles), repair_bytes=repair.size_bytes)
                log.warning(
                    "weights.tiles_repaired",
                    version=held.holding.version,
                    tile=str(tiles[0]),
                    tiles=len(tiles),
                    bytes=repair.size_bytes,
                )
                return steps.advance

        return heal

    def _build(self, fetcher: Fetcher, plan: PullPlan, *, to: Holding, manifest: Manifest) -> None:
        """Decode a version into a file beside what is held, if anything is, and put it in its place."""
        check_size(manifest, max_bytes=self._settings.max_model_bytes)
        grid = TileGrid(manifest.schema)
        partial = self._files.partial
        partial.unlink(missing_ok=True)
        try:
            checkpoint.create_weights_file(partial, grid.schema.specs)
            tiles = MappedTiles(partial, grid)
            fetcher.build(plan.steps[0], tiles)
            change = steps_of(grid, fetcher.sets(plan.steps[1:]))
            for tile in change.changed:
                change.advance(tile, tiles.view(tile))
            require_manifest(tiles, manifest, edges=frozenset(step.edge for step in plan.steps))
            fetcher.assets(manifest.assets, manifest=manifest)
            self._content.replace(to=to, manifest=manifest, digests=tiles.digests())
        finally:
            partial.unlink(missing_ok=True)

    def _fetch(self, fetcher: Fetcher, plan: PullPlan, *, manifest: Manifest) -> list[tuple[Edge, PartSet]]:
        """All that the plan needs, in the journal."""
        check_size(manifest, max_bytes=self._settings.max_model_bytes)
        wrong = set(self._files.wrong_assets(manifest))
        assets = [asset for asset in manifest.assets if asset.file_name in wrong]
        self._journal.keep_only(
            [*(ref for step in plan.steps for ref in step.parts), *(asset.blob for asset in assets)]
        )
        fetcher.assets(assets, manifest=manifest)
        return fetcher.sets(plan.steps)

    def _fetcher(self, manifest: Manifest) -> Fetcher:
        """For one plan."""
        return Fetcher(
            store=self._store,
            journal=self._journal,
            schema=manifest.schema,
            threads=self._settings.fetch_threads,
            rates=self._rates,
        )

    @property
    def is_here(self) -> bool:
        """Whether the version is held, whole as far as is known."""
        held = self._content.held
        return held is not None and held.holding == _holding(self._record) and self._content.is_whole

    @property
    def base(self) -> int | None:
        """The version that deltas can start from."""
        held = self._content.held
        whole = held is not None and self._content.is_whole and self._is_in(held.holding)
        return held.holding.version if held is not None and whole else None

    def _is_in(self, holding: Holding) -> bool:
        """False when the log was begun anew under the same names: what is here cannot be built upon."""
        records = self._log.records[holding.version : holding.version + 1]
        return bool(records) and _holding(records[0]) == holding

    def _in_place(self, manifest: Manifest) -> bool:
        """Whether what is here is of the same model and of this log."""
        held = self._content.held
        if held is None or not self._is_in(held.holding):
            return False
        return held.tiles.grid.schema == manifest.schema

    def _plan_if_any(self, *, held: int | None, avoid: frozenset[Edge]) -> PullPlan | None:
        try:
            return self._cheapest(held=held, target=self._record.version, avoid=avoid)
        except NoPath:
            return None


class _Dearer(Exception):
    """A repair would fetch more than a snapshot has."""


def _holding(record: VersionRecord) -> Holding:
    return Holding(version=record.version, manifest_sha256=record.manifest_sha256.hex())
