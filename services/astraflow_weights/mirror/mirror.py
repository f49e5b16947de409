"""A node's one copy of one policy's weights: a checkpoint folder that is changed in place and never loaded torn.

Invariant: what `version` names is whole and verified. Everything a change needs is fetched, compared with its sha256,
opened and kept in the journal before anything is written over; whoever dies at whatever instant, the next opening
finishes the change without fetching. Tiles that match nothing are fetched alone. Engines load under `hold`. The
node's weight sync and a resuming trainer call `advance`.

The files are described in `mirror.state`, the change of a tile in `tile_writer`.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from astraflow_kit.log import get_logger
from astraflow_weights.codec.tensors import Array
from astraflow_weights.errors import Edge, MirrorBusy, MirrorMismatch, VerificationFailed
from astraflow_weights.mirror import checkpoint
from astraflow_weights.mirror import lock as mirror_lock
from astraflow_weights.mirror.changes import ChangedElements
from astraflow_weights.mirror.content import MirrorContent
from astraflow_weights.mirror.journal import Journal
from astraflow_weights.mirror.lock import Hold
from astraflow_weights.mirror.pull import MirrorPull
from astraflow_weights.mirror.pull_guard import PullGuard
from astraflow_weights.mirror.state import MirrorFiles
from astraflow_weights.settings import MirrorSettings
from astraflow_weights.store import ObjectStore
from astraflow_weights.versions.log import VersionLog
from astraflow_weights.versions.probe import Probe
from astraflow_weights.versions.pull import PullCounts
from astraflow_weights.versions.rates import MeasuredRates

log = get_logger(__name__)

_POLL_S = 0.01


@dataclass(frozen=True, kw_only=True)
class AdvanceResult:
    """What `advance` did. `base_version` is the version it started from, None when it took a snapshot first.

    `rejected` are paths in the log that proved bad and were gone around: report them.
    """

    version: int
    directory: Path
    base_version: int | None
    counts: PullCounts
    rejected: frozenset[Edge] = frozenset()
    probe: Probe | None = None
    """What a model with these weights answers, when the version says so."""
    changes: ChangedElements | None = None
    """What differs from what was held before, when the settings ask for it and all of it is known."""


class Mirror:
    """One policy's weights in a folder of this machine. Not thread-safe, but for `try_hold`; every call blocks.

    mirror = Mirror(folder)
    mirror.advance(store, log, target=7)
    with mirror.hold() as held:
        engine.load(held.directory)
    """

    def __init__(self, directory: Path, *, settings: MirrorSettings | None = None) -> None:
        """Open or create the folder; a change that was interrupted is finished, and all digests are compared."""
        self._root = directory.resolve()
        self._settings = settings or MirrorSettings()
        self._files = MirrorFiles(self._root)
        self._files.make_folders()
        self._journal = Journal(self._files.journal)
        self._content = MirrorContent(self._files, self._journal, settings=self._settings)
        self.counts = PullCounts()
        """What this object fetched since it was opened."""
        self._guard = PullGuard()
        self._rates = MeasuredRates(parallel=self._settings.fetch_threads)
        try:
            with mirror_lock.pulling(self._root):
                self._content.open(recover=True)
        except MirrorBusy:
            # Somebody else changes it now and answers for it; `advance` says so.
            self._content.open(recover=False)

    @property
    def version(self) -> int | None:
        """The version that is held, None when none is whole."""
        return self._content.version

    @property
    def directory(self) -> Path | None:
        """Checkpoint folder of the version that is held. The next version is written over it: load under `hold`."""
        return self._files.checkpoint if self.version is not None else None

    @property
    def damage(self) -> VerificationFailed | None:
        """What is known to be wrong with what is here and could not be repaired yet; None when nothing is."""
        return self._content.damage

    def try_hold(self) -> Hold | None:
        """Keep the version as it is while an engine loads; None when it is being changed or is not whole. Any
        thread.
        """
        held = mirror_lock.try_hold(self._root)
        state = self._content.state
        ours = held is not None and state is not None and held.written_by == state.written_by
        if held is not None and ours and not self._content.is_whole:
            held.release()
            return None
        return held

    @contextmanager
    def hold(self, *, patience_s: float = 600.0) -> Iterator[Hold]:
        """Wait for a whole version and keep it as it is. Raises MirrorBusy."""
        deadline_s = time.monotonic() + patience_s
        while (held := self.try_hold()) is None:
            if time.monotonic() > deadline_s:
                raise MirrorBusy(
                    f"{self._root} held no whole version for {patience_s:.0f} s; see the log why"
                )
            time.sleep(_POLL_S)
        try:
            yield held
        finally:
            held.release()

    def load(self) -> dict[str, Array]:
        """Writable copy of the tensors of the held version. Raises ValueError when nothing is held."""
        if self.version is None:
            raise ValueError(f"the mirror {self._root} holds no version; advance it first")
        with self.hold() as held:
            model = checkpoint.map_model(held.directory)
            return {name: np.array(array) for name, array in model.items()}

    def prefetch(self, store: ObjectStore, log_reader: VersionLog, *, target: int) -> PullCounts:
        """Bring what `advance` would need into the journal and change nothing that engines load; returns what was
        fetched.

        Does nothing while there is no whole version to start from. Raises as `advance` does.
        """
        with mirror_lock.pulling(self._root):
            pull = self._pull(store, log_reader, target=target)
            try:
                with self._guard.over(store, log_reader):
                    pull.prefetch()
            finally:
                self.counts += pull.counts
            return pull.counts

    def advance(self, store: ObjectStore, log_reader: VersionLog, *, target: int) -> AdvanceResult:
        """Hold version `target`, newer or older than the one held. Does not refresh the log.

        Goes around paths that prove bad; raises VerificationFailed when no good one is left. Also raises
        UnknownVersionError, NoPath, MirrorBusy, MirrorMismatch, CorruptManifest, Unavailable, StoreRefused,
        and OSError when there is no room. After any error what was held before is intact, or `version` is None and
        the next call repairs it.
        """
        with mirror_lock.pulling(self._root):
            pull = self._pull(store, log_reader, target=target)
            try:
                with self._guard.over(store, log_reader):
                    base, rejected = pull.run()
            finally:
                self.counts += pull.counts
            held, changes = self._content.held, self._content.changes
            return AdvanceResult(
                changes=changes if changes is not None and changes.version == target else None,
                probe=held.manifest.probe if held is not None else None,
                version=target,
                directory=self._files.checkpoint,
                base_version=base,
                counts=pull.counts,
                rejected=rejected,
            )

    def lend_manifest(self, log_reader: VersionLog) -> None:
        """Give the log the manifest of the held version, where nobody can read its entry."""
        held = self._content.held
        if held is not None:
            log_reader.restore(held.manifest, manifest_sha256=bytes.fromhex(held.holding.manifest_sha256))

    def _pull(self, store: ObjectStore, log_reader: VersionLog, *, target: int) -> MirrorPull:
        # First the record: a log that does not know the target says nothing about what is held.
        pull = MirrorPull(
            store,
            log_reader,
            log_reader.record(target),
            files=self._files,
            journal=self._journal,
            content=self._content,
            settings=self._settings,
            guard=self._guard,
            rates=self._rates,
        )
        self._reread(log_reader, pull)
        return pull

    def _reread(self, log_reader: VersionLog, pull: MirrorPull) -> None:
        """Believe the disk when another process has been here, and compare all bytes when they are the target's."""
        if not self._content.is_current:
            self._content.open(recover=True)
        held = self._content.held
        if held is None:
            return
        ours = held.manifest.run_id, held.manifest.policy_id
        if ours != (log_reader.run_id, log_reader.policy_id):
            raise MirrorMismatch(
                f"{self._root} mirrors {'/'.join(ours)}, not {log_reader.run_id}/{log_reader.policy_id}; "
                "use one folder per run and policy"
            )
        if pull.is_here:
            self._content.verify()
