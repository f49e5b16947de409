"""A node's copy of one policy's weights: on disk, always a whole verified version.

Invariant: the folder of the version that is held is never written to; a new version is fetched, applied to
a copy, compared with its manifest tensor by tensor, written beside, synced, and only then made current by
an atomic rename. Whatever fails or dies in between, the old version stays loadable. The node's weight sync
and a resuming trainer call `advance`.

    <directory>/versions/<version:020d>/   checkpoint folders
    <directory>/current                    link to the one that is held
    <directory>/lock                       held by the process that advances
"""

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from astraflow_kit import failpoints
from astraflow_weights import checkpoint
from astraflow_weights.checkpoint import DamagedCheckpoint, VersionFile
from astraflow_weights.digest import model_root, sha256
from astraflow_weights.durable import sync_folder
from astraflow_weights.errors import (
    CorruptPart,
    Edge,
    MirrorBusy,
    MirrorMismatch,
    NoPath,
    VerificationFailed,
)
from astraflow_weights.fetch import fetch_part
from astraflow_weights.manifest import Asset, Manifest
from astraflow_weights.planner import PullPlan, plan_pull
from astraflow_weights.pull import PullCounts, counts_of, pull
from astraflow_weights.pull_guard import PullGuard
from astraflow_weights.settings import MirrorSettings
from astraflow_weights.store import ObjectStore
from astraflow_weights.tensor_hash import tensor_digests
from astraflow_weights.tensors import Array
from astraflow_weights.version_log import VersionLog, VersionRecord

_INCOMING = "incoming-"


@dataclass(frozen=True, kw_only=True)
class AdvanceResult:
    """What `advance` did. `base_version` is the version it started from, None when it took a snapshot first.

    `rejected` are ways in the log that proved bad and were gone around: report them.
    """

    version: int
    directory: Path
    base_version: int | None
    counts: PullCounts
    rejected: frozenset[Edge] = frozenset()


class Mirror:
    """One policy's weights in a folder of this machine. One owner per object: not thread-safe; every call
    blocks.

    mirror = Mirror(folder)
    result = mirror.advance(store, log, target=7)
    engine.load(result.directory)
    """

    def __init__(self, directory: Path, *, settings: MirrorSettings | None = None) -> None:
        """Open or create the folder; a version found there is held only if all its digests match."""
        self._root = directory.resolve()
        self._versions = self._root / "versions"
        self._link = self._root / "current"
        self._settings = settings or MirrorSettings()
        self._counts = PullCounts()
        self._guard = PullGuard()
        self._versions.mkdir(parents=True, exist_ok=True)
        self._held = self._current()

    @property
    def version(self) -> int | None:
        """The version that is held, None when there is none."""
        return self._held.version if self._held else None

    @property
    def directory(self) -> Path | None:
        """Checkpoint folder of the version that is held; it outlives `keep_versions` - 1 further versions."""
        return self._folder(self._held.version) if self._held else None

    @property
    def counts(self) -> PullCounts:
        """What this object fetched since it was opened."""
        return self._counts

    def versions(self) -> list[int]:
        """Versions whose folders lie here, ascending; each was verified when it was written. Any thread."""
        return sorted(int(folder.name) for folder in self._versions.iterdir())

    def load(self) -> dict[str, Array]:
        """Writable copy of the tensors of the held version. Raises ValueError when nothing is held."""
        if self.directory is None:
            raise ValueError(f"the mirror {self._root} holds no version; advance it first")
        return {name: np.array(array) for name, array in checkpoint.map_model(self.directory).items()}

    def advance(self, store: ObjectStore, log: VersionLog, *, target: int) -> AdvanceResult:
        """Hold version `target`, newer or older than the one held. Does not refresh the log.

        Goes around ways that prove bad; raises VerificationFailed when no good one is left. Also raises
        UnknownVersionError, NoPath, MirrorBusy, MirrorMismatch, CorruptManifest, Unavailable, StoreRefused,
        and OSError when the disk is full. After any error the version held before is intact and loadable.
        """
        with self._exclusive():
            # First: a log that does not know the target says nothing about what is held.
            record = log.record(target)
            self._reread(log)
            if self._switch_to_present(record):
                return self._result(base_version=target, counts=PullCounts())
            with self._guard.over(store, log):
                return self._pull(store, log, record=record)

    def _pull(self, store: ObjectStore, log: VersionLog, *, record: VersionRecord) -> AdvanceResult:
        """Carry out one plan after another until one ends in the version."""
        manifest = log.manifest(record.version)
        plan = self._plan(log, target=record.version, avoid=frozenset())
        rejected: frozenset[Edge] = frozenset()
        for repairs_left in range(self._settings.max_repairs, -1, -1):
            try:
                counts = self._follow(store, plan, record=record, manifest=manifest)
            except VerificationFailed as failure:
                rejected |= failure.edges
                plan = self._plan_around(
                    log, failure, target=record.version, avoid=rejected, left=repairs_left
                )
            else:
                return self._result(base_version=plan.held, counts=counts, rejected=rejected)
        raise AssertionError("the last repair returns or raises")

    def _plan(self, log: VersionLog, *, target: int, avoid: frozenset[Edge]) -> PullPlan:
        """The cheapest plan whose parts are protected while it is carried out."""
        return self._guard.plan(
            lambda avoided: plan_pull(log, held=self.version, target=target, avoid=avoided), avoid=avoid
        )

    def _plan_around(
        self, log: VersionLog, failure: VerificationFailed, *, target: int, avoid: frozenset[Edge], left: int
    ) -> PullPlan:
        """Another plan; raises the failure when there is none to be tried."""
        if not left or not failure.edges:
            raise failure
        try:
            return self._plan(log, target=target, avoid=avoid)
        except NoPath:
            raise failure from None

    def _follow(
        self, store: ObjectStore, plan: PullPlan, *, record: VersionRecord, manifest: Manifest
    ) -> PullCounts:
        """Carry out one plan. Raises VerificationFailed."""
        model = pull(
            store,
            plan,
            manifest=manifest,
            load_base=self.load,
            threads=self._settings.fetch_threads,
            max_bytes=self._settings.max_model_bytes,
        )
        assets, asset_bytes = self._gather_assets(store, manifest)
        self._install(model, assets, _version_file(manifest, record))
        return counts_of(plan) + PullCounts(asset_bytes=asset_bytes)

    def _gather_assets(self, store: ObjectStore, manifest: Manifest) -> tuple[dict[str, bytes], int]:
        """Contents by file name, and how many bytes were fetched because the held version lacks them."""
        contents = {asset.file_name: self._held_asset(asset) for asset in manifest.assets}
        fetched_bytes = 0
        for asset in manifest.assets:
            if contents[asset.file_name] is None:
                contents[asset.file_name] = _fetch_asset(store, asset, version=manifest.version)
                fetched_bytes += asset.blob.size_bytes
        return {name: content for name, content in contents.items() if content is not None}, fetched_bytes

    def _held_asset(self, asset: Asset) -> bytes | None:
        path = self._link / asset.file_name
        if self._held is None or asset.file_name not in self._held.assets or not path.is_file():
            return None
        content = path.read_bytes()
        return content if sha256(content) == asset.blob.sha256 else None

    def _install(self, model: dict[str, Array], assets: dict[str, bytes], version_file: VersionFile) -> None:
        incoming = self._root / f"{_INCOMING}{secrets.token_hex(8)}"
        folder = self._folder(version_file.version)
        try:
            checkpoint.write_checkpoint(incoming, model, assets=assets, version_file=version_file)
            failpoints.hit("weights.mirror.before_rename")
            # A folder of that name is damaged or of another run, else it would have been switched to.
            shutil.rmtree(folder, ignore_errors=True)
            incoming.rename(folder)
        finally:
            shutil.rmtree(incoming, ignore_errors=True)
        sync_folder(self._versions)
        self._make_current(version_file)

    def _make_current(self, version_file: VersionFile) -> None:
        previous = self._held
        checkpoint.replace_link(self._link, os.path.relpath(self._folder(version_file.version), self._root))
        self._held = version_file
        newest_first = sorted(self._versions.iterdir(), key=lambda path: -path.stat().st_mtime)
        wanted = [self._folder(held.version) for held in (version_file, previous) if held is not None]
        for folder in list(dict.fromkeys(wanted + newest_first))[self._settings.keep_versions :]:
            # What cannot be removed now is tried again after the next version.
            shutil.rmtree(folder, ignore_errors=True)

    def _switch_to_present(self, record: VersionRecord) -> bool:
        """Make the version current if it lies on the disk already, whole and verified."""
        if self.version == record.version:
            return True
        present = self._verified(self._folder(record.version))
        if present is None or present.manifest_sha256 != record.manifest_sha256.hex():
            return False
        self._make_current(present)
        return True

    def _reread(self, log: VersionLog) -> None:
        """Believe the disk and the log, not memory: another process may have advanced, a disk may have
        rotted.
        """
        for leftover in self._root.glob(f"{_INCOMING}*"):
            shutil.rmtree(leftover)
        self._held = self._current()
        if self._held is None:
            return
        if (self._held.run_id, self._held.policy_id) != (log.run_id, log.policy_id):
            raise MirrorMismatch(
                f"{self._root} mirrors {self._held.run_id}/{self._held.policy_id}, "
                f"not {log.run_id}/{log.policy_id}; use one folder per run and policy"
            )
        records = log.records[self._held.version : self._held.version + 1]
        if not records or records[0].manifest_sha256.hex() != self._held.manifest_sha256:
            # The log was begun anew under the same names; what is on disk cannot be built upon.
            self._held = None

    def _current(self) -> VersionFile | None:
        return self._verified(self._link.resolve()) if self._link.is_symlink() else None

    def _verified(self, folder: Path) -> VersionFile | None:
        """What the folder holds, None unless its tensors have the root that its version file says."""
        try:
            version_file = checkpoint.read_version_file(folder)
            root = model_root(tensor_digests(checkpoint.map_model(folder)))
        except DamagedCheckpoint:
            # Not an error: a version that cannot be trusted is fetched again.
            return None
        intact = root.hex() == version_file.model_root and folder == self._folder(version_file.version)
        return version_file if intact else None

    def _result(
        self, *, base_version: int | None, counts: PullCounts, rejected: frozenset[Edge] = frozenset()
    ) -> AdvanceResult:
        assert self._held is not None
        assert self.directory is not None
        self._counts += counts
        return AdvanceResult(
            version=self._held.version,
            directory=self.directory,
            base_version=base_version,
            counts=counts,
            rejected=rejected,
        )

    def _folder(self, version: int) -> Path:
        return self._versions / f"{version:020d}"

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        descriptor = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._take_lock(descriptor)
            yield
        finally:
            os.close(descriptor)

    def _take_lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise MirrorBusy(f"another process advances {self._root}; one puller per folder") from error


def _fetch_asset(store: ObjectStore, asset: Asset, *, version: int) -> bytes:
    try:
        return fetch_part(store, asset.blob)
    except CorruptPart as error:
        raise VerificationFailed(
            f"{asset.file_name!r} of version {version} is damaged: {error}", version=version
        ) from error


def _version_file(manifest: Manifest, record: VersionRecord) -> VersionFile:
    return VersionFile(
        schema_version=checkpoint.SCHEMA_VERSION,
        run_id=manifest.run_id,
        policy_id=manifest.policy_id,
        version=manifest.version,
        manifest_sha256=record.manifest_sha256.hex(),
        model_root=manifest.model_root.hex(),
        assets={asset.file_name: asset.blob.sha256.hex() for asset in manifest.assets},
    )
