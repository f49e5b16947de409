"""The weights file of a mirror and what is known of it: verified, being changed, or damaged.

Invariant: `version` is given only for content whose every tensor and asset was compared with the manifest; a change
begins with everything it needs in the journal, ends with every tensor compared again, and says in the state which of
both holds at every instant between. Fetches nothing. `mirror` calls it, one thread at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from astraflow_kit import failpoints
from astraflow_kit.log import get_logger
from astraflow_weights.codec.parts.reader import PartSet, joined
from astraflow_weights.codec.tensor_hash import tensor_digest
from astraflow_weights.durable import replace_synced, sync_file
from astraflow_weights.errors import CorruptPart, Edge, VerificationFailed
from astraflow_weights.mirror import lock as mirror_lock
from astraflow_weights.mirror.changes import ChangedElements, ChangeRecorder
from astraflow_weights.mirror.checkpoint import DamagedCheckpoint
from astraflow_weights.mirror.journal import Journal
from astraflow_weights.mirror.state import (
    Applying,
    Holding,
    MirrorFiles,
    MirrorState,
    applying,
    boot_id,
    new_state,
    steps_in,
)
from astraflow_weights.mirror.tile_grid import GridTile, MappedTiles, TileDigests, TileGrid, UInts
from astraflow_weights.mirror.tile_steps import TileSteps, kind_of, steps_of
from astraflow_weights.mirror.tile_writer import TileWriter
from astraflow_weights.settings import MirrorSettings
from astraflow_weights.versions.manifest import Manifest
from astraflow_weights.versions.planner import PullStep
from astraflow_weights.versions.pull import came_out_different
from astraflow_weights.versions.rates import stopwatch

log = get_logger(__name__)

Fill = Callable[[GridTile, UInts], None]
# Given tiles of what is held, tells how to write them anew; raises as a store does.
Heal = Callable[[Sequence[GridTile]], Fill]


@dataclass
class Held:
    """A version whose bytes are, or were before a change, in the weights file."""

    holding: Holding
    manifest: Manifest
    tiles: MappedTiles
    digests: TileDigests


class MirrorContent:
    """The content of one mirror's folder."""

    def __init__(self, files: MirrorFiles, journal: Journal, *, settings: MirrorSettings) -> None:
        self._files = files
        self._journal = journal
        self._settings = settings
        self.state: MirrorState | None = None
        self.held: Held | None = None
        self.damaged: list[GridTile] = []
        """Tiles that are not those of `held`, as far as is known."""
        self.wrong_assets: list[str] = []
        self._recorder: ChangeRecorder | None = None
        self.changes: ChangedElements | None = None
        """Of the last `apply`, when the settings ask for them and all are known."""

    @property
    def version(self) -> int | None:
        """The version that is here, whole; None when none is."""
        return self.held.holding.version if self.held is not None and self.is_whole else None

    @property
    def is_whole(self) -> bool:
        """Whether an engine may load what is here."""
        clean = self.state is not None and self.state.applying is None
        return self.held is not None and clean and not self.damaged and not self.wrong_assets

    @property
    def damage(self) -> VerificationFailed | None:
        """What is known to be wrong with what is held, as the failure that it is; None when nothing is."""
        if not self.damaged or self.held is None:
            return None
        tile, version = self.damaged[0], self.held.holding.version
        others = f", nor are {len(self.damaged) - 1} others" if len(self.damaged) > 1 else ""
        return VerificationFailed(
            f"{tile} is not what version {version} has there{others}; it is fetched anew when the store answers",
            version=version,
            tensor=tile.spec.name,
            tile=tile.number,
        )

    @property
    def is_current(self) -> bool:
        """Whether no other process has written here since."""
        found = self._files.read_state()
        return (found and found.written_by) == (self.state and self.state.written_by)

    def open(self, *, recover: bool) -> None:
        """Believe the disk: verify everything, and finish what was being applied when `recover` says so."""
        self.state, self.held, self.damaged, self.wrong_assets = self._files.read_state(), None, [], []
        if self.state is None:
            return
        if self.state.boot_id != boot_id():
            log.info("weights.mirror_of_another_boot", folder=str(self._files.root))
        change = self.state.applying
        if change is not None and change.steps:
            if self.state.held is not None and self._take(self.state.held) and recover:
                self._recover()
        elif not (change is not None and self._take(change.to) and not self.damaged):
            self.held = None
            if self.state.held is not None:
                self._take(self.state.held)
        if recover and self.held is not None and not (change is not None and change.steps):
            self._settle()

    def verify(self) -> None:
        """Compare all that is held with its manifest; `damaged` and `wrong_assets` tell what is not right."""
        assert self.held is not None
        held = self.held
        self.wrong_assets = self._files.wrong_assets(held.manifest)
        names = set(wrong_tensors(held.tiles, held.manifest))
        self.damaged = [
            tile
            for tile in held.tiles.grid.tiles
            if tile.spec.name in names and held.tiles.digest(tile) != held.digests[tile.index].tobytes()
        ]
        if names - {tile.spec.name for tile in self.damaged}:
            # Its digests of tiles are wrong, too: nothing tells good from bad.
            self.damaged = list(held.tiles.grid.tiles)

    def apply(
        self,
        sets: Sequence[tuple[Edge, PartSet]],
        steps: tuple[PullStep, ...],
        *,
        to: Holding,
        manifest: Manifest,
        heal: Heal,
    ) -> float:
        """Change what is held into another version, in place; returns the seconds that took, waiting apart. Parts and
        assets are in the journal.

        Raises VerificationFailed: then what was held is here again, or `damaged` says what of it is not.
        """
        assert self.held is not None
        base, grid, self.changes = self.held.holding, self.held.tiles.grid, None
        change = steps_of(grid, sets)
        self._recorder = ChangeRecorder(grid) if self._settings.record_changes else None
        self._journal.begin(grid, threads=self._settings.apply_threads)
        self._files.write_manifest(to, manifest)
        with mirror_lock.exclusive(self._files.root, patience_s=self._settings.lock_patience_s):
            self._write_state(self.held, applying(to, steps))
            failpoints.hit("weights.mirror.applying")
            with stopwatch() as elapsed:
                self._finish(change, to=to, manifest=manifest, heal=heal)
        if self._recorder:
            self.changes = self._recorder.changes(base_version=base.version, version=to.version)
        return elapsed.seconds

    def resume(self, heal: Heal | None) -> None:
        """Finish what an earlier process, or an earlier call, could not. Raises as `apply` does."""
        assert self.state is not None
        assert self.state.applying is not None
        change = self._journaled(self.state.applying)
        manifest = self._files.read_manifest(self.state.applying.to)
        if change is None or manifest is None:
            self._abandon()
            return
        with mirror_lock.exclusive(self._files.root, patience_s=self._settings.lock_patience_s):
            self._finish(change, to=self.state.applying.to, manifest=manifest, heal=heal)

    def repair(self, heal: Heal) -> None:
        """Write damaged tiles anew, and assets from the journal. Raises VerificationFailed."""
        assert self.held is not None
        held = self.held
        fill = heal(self.damaged) if self.damaged else None
        with mirror_lock.exclusive(self._files.root, patience_s=self._settings.lock_patience_s):
            if fill is not None:
                self._journal.begin(held.tiles.grid, threads=self._settings.apply_threads)
                writer = self._writer(held)
                self.damaged = writer.restore(self.damaged, fill)
                self._require_healed()
            self._install_assets(held.manifest)
            sync_file(self._files.weights)
            self.verify()
            self._write_state(held)

    def replace(self, *, to: Holding, manifest: Manifest, digests: TileDigests) -> None:
        """Put the partial file, which was verified, in the place of what is held."""
        self._files.write_manifest(to, manifest)
        self._files.write_digests(to, digests)
        sync_file(self._files.partial)
        with mirror_lock.exclusive(self._files.root, patience_s=self._settings.lock_patience_s):
            state = Applying(to=to, steps=())
            self._write_state(self.held, state, run=(manifest.run_id, manifest.policy_id))
            self._files.partial.replace(self._files.weights)
            failpoints.hit("weights.mirror.replaced")
            self._install_assets(manifest)
            taken = self._take(to)
            assert taken, "what was verified a moment ago cannot be read"
            self._write_state(self.held)
        self._files.forget_but(to)

    def _finish(self, change: TileSteps, *, to: Holding, manifest: Manifest, heal: Heal | None) -> None:
        """From APPLYING to CLEAN(to), or back to what was held. Under the exclusive lock."""
        assert self.held is not None
        held, writer = self.held, self._writer(self.held)
        try:
            self._advance(writer, change, held=held, manifest=manifest, heal=heal)
        except VerificationFailed as failure:
            if failure.edges:
                self._back(writer, change, held=held)
            raise
        failpoints.hit("weights.mirror.applied")
        sync_file(self._files.weights)
        digests = writer.new_digests()
        self._files.write_digests(to, digests)
        self._install_assets(manifest)
        self.held = Held(holding=to, manifest=manifest, tiles=held.tiles, digests=digests)
        self.damaged = []
        self._write_state(self.held)
        self._files.forget_but(to)

    def _advance(
        self, writer: TileWriter, change: TileSteps, *, held: Held, manifest: Manifest, heal: Heal | None
    ) -> None:
        """Raises VerificationFailed; without edges when only damage stands in the way."""
        for check in (False, True):
            self.damaged = writer.advance(change, check=check)
            if self.damaged and heal is not None:
                self.damaged = writer.restore(self.damaged, heal(self.damaged))
                self._require_healed()
                self.damaged = writer.advance(change, check=check)
            self._require_healed()
            if not wrong_tensors(held.tiles, manifest):
                return
        require_manifest(held.tiles, manifest, edges=frozenset(change.edges))

    def _back(self, writer: TileWriter, change: TileSteps, *, held: Held) -> None:
        """Take the path back as far as it can be taken."""
        self.damaged = writer.revert(change)
        if not self.damaged:
            self._write_state(held)
        log.warning("weights.mirror_reverted", version=held.holding.version, damaged_tiles=len(self.damaged))

    def _recover(self) -> None:
        """At the opening: no store is at hand."""
        assert self.state is not None
        assert self.state.applying is not None
        version = self.state.applying.to.version
        try:
            self.resume(None)
        except VerificationFailed as failure:
            log.warning("weights.mirror_unfinished", version=version, message=failure.message)
            return
        log.info("weights.mirror_recovered", version=self.version)

    def _settle(self) -> None:
        """Write down what the verification found."""
        assert self.held is not None
        assert self.state is not None
        if self.wrong_assets:
            self._install_assets(self.held.manifest)
        if self.state.applying is not None or self.state.whole != (not self.damaged):
            self._write_state(self.held)

    def _abandon(self) -> None:
        """The journal does not hold what the state says: what is still old counts, the rest is damaged."""
        assert self.held is not None
        self.verify()
        if not self.damaged:
            self._write_state(self.held)

    def _take(self, holding: Holding) -> bool:
        """Take the weights file for that version and verify it, unless it is being changed; False when it cannot be
        read as one.
        """
        manifest = self._files.read_manifest(holding)
        if manifest is None:
            return False
        grid = TileGrid(manifest.schema)
        digests = self._files.read_digests(holding, grid)
        try:
            tiles = MappedTiles(self._files.weights, grid)
        except DamagedCheckpoint as error:
            log.warning("weights.mirror_unreadable", folder=str(self._files.root), message=str(error))
            return False
        in_change = self.state is not None and self.state.applying is not None and self.state.applying.steps
        if digests is None and in_change:
            return False
        self.held = Held(
            holding=holding,
            manifest=manifest,
            tiles=tiles,
            digests=tiles.digests() if digests is None else digests,
        )
        if not in_change:
            self.verify()
        return True

    def _journaled(self, change: Applying) -> TileSteps | None:
        """The steps of a change, from the journal; None when it does not hold them whole."""
        assert self.held is not None
        if self._journal.progress(self.held.tiles.grid) is None:
            return None
        sets, grid = [], self.held.tiles.grid
        try:
            for step in steps_in(change):
                parts = [self._journal.part(ref) for ref in step.parts]
                whole = [part for part in parts if part is not None]
                sets.append((step.edge, joined(whole, kind=kind_of(step.edge), schema=grid.schema)))
        except CorruptPart:
            return None
        return steps_of(grid, sets)

    def _writer(self, held: Held) -> TileWriter:
        return TileWriter(
            held.tiles,
            old=held.digests,
            journal=self._journal,
            threads=self._settings.apply_threads,
            recorder=self._recorder,
        )

    def _require_healed(self) -> None:
        if (damage := self.damage) is not None:
            raise damage

    def _install_assets(self, manifest: Manifest) -> None:
        for name in self._files.wrong_assets(manifest):
            asset = next(asset for asset in manifest.assets if asset.file_name == name)
            content = self._journal.asset(asset.blob)
            if content is not None:
                replace_synced(self._files.checkpoint / name, content)
        self._files.remove_other_assets(manifest)
        self.wrong_assets = self._files.wrong_assets(manifest)

    def _write_state(
        self, held: Held | None, change: Applying | None = None, *, run: tuple[str, str] | None = None
    ) -> None:
        run_id, policy_id = run or (held.manifest.run_id, held.manifest.policy_id)  # type: ignore[union-attr]
        state = new_state(
            run_id=run_id,
            policy_id=policy_id,
            held=held.holding if held else None,
            applying=change,
            whole=not self.damaged,
        )
        self._files.write_state(state)
        self.state = state


def wrong_tensors(tiles: MappedTiles, manifest: Manifest) -> list[str]:
    """Names of tensors that do not have the manifest's digest."""
    return [
        tensor.spec.name
        for tensor in manifest.tensors
        if tensor_digest(tiles.model[tensor.spec.name]) != tensor.digest
    ]


def require_manifest(tiles: MappedTiles, manifest: Manifest, *, edges: frozenset[Edge]) -> None:
    """Raises VerificationFailed, suspecting `edges`, unless every tensor is what the manifest says."""
    wrong = wrong_tensors(tiles, manifest)
    if wrong:
        raise came_out_different(manifest, wrong, edges=edges)
