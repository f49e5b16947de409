"""A policy's versions as the store's log tells them.

Invariant: every reader of the same entries sees the same versions: along the sequence epochs never fall, an
entry with an epoch lower than one before it is ignored, and the manifests that remain are numbered 0, 1, 2
… without gaps. Paths that were added beside the log count only when they lead to a model root that the
log has; damaged ones are passed over, for they are never the only path. Writer, planner and mirror ask it;
it writes nothing. One owner per object: not thread-safe.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from astraflow.errors import IncompatibleError, UnknownVersionError
from astraflow_weights.codec.digest import sha256
from astraflow_weights.errors import CorruptManifest, ObjectNotFound
from astraflow_weights.store import ObjectStore
from astraflow_weights.store.layout import PolicyKeys
from astraflow_weights.versions.collection_records import Sweep, decode_sweep
from astraflow_weights.versions.fetch import fetch_objects
from astraflow_weights.versions.manifest import (
    AddedPath,
    DeltaRef,
    Entry,
    Fence,
    Manifest,
    ManifestEntry,
    PartRef,
    decode_entry,
    decode_path,
)
from astraflow_weights.versions.references.following import References

_READ_THREADS = 8


@dataclass(frozen=True, kw_only=True)
class VersionRecord:
    """What is kept in memory of every version; the tensors and assets stay in its manifest.

    `snapshot` and `deltas` are the manifest's, `added` are the paths made since.
    """

    version: int
    sequence: int
    writer_epoch: int
    step: int
    manifest_sha256: bytes
    model_root: bytes
    snapshot: tuple[PartRef, ...] | None
    deltas: tuple[DeltaRef, ...]
    num_changed: int
    num_elements: int
    created_time_s: float = 0.0
    """By its trainer's clock."""
    rollback_of: int | None = None
    added: tuple[AddedPath, ...] = ()
    swept: frozenset[int | None] = frozenset()
    """Bases of the manifest's paths that were collected; None stands for its snapshot."""

    @property
    def density(self) -> float:
        """Changed share of all elements against the version before; 0 for a model without elements."""
        return self.num_changed / self.num_elements if self.num_elements else 0.0

    @property
    def offered_snapshot(self) -> tuple[PartRef, ...] | None:
        """Parts of the snapshot, whenever it was made; None when there is none, or it was collected."""
        if self.snapshot is not None and None not in self.swept:
            return self.snapshot
        return next((path.parts for path in self.added if path.base_version is None), None)

    @property
    def offered_deltas(self) -> tuple[DeltaRef, ...]:
        """The manifest's deltas and the merged ones, one per base version, without those collected."""
        deltas = tuple(delta for delta in self.deltas if delta.base_version not in self.swept)
        bases = {delta.base_version for delta in deltas}
        return deltas + tuple(
            DeltaRef(base_version=path.base_version, parts=path.parts)
            for path in self.added
            if path.base_version is not None and path.base_version not in bases
        )

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of the parts of the manifest's snapshot; 0 when it has none."""
        return sum(part.size_bytes for part in self.snapshot or ())

    @property
    def delta_bytes(self) -> int:
        """Bytes of the delta from the version before; 0 when there is none."""
        return sum(delta.size_bytes for delta in self.deltas if delta.base_version == self.version - 1)


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The writer with the highest epoch so far."""

    epoch: int
    nonce: bytes


class VersionLog:
    """Reads the log of one policy. Starts empty: call `refresh`.

    log = VersionLog(store, run_id="r1", policy_id="solver")
    newest = log.refresh()
    """

    def __init__(self, store: ObjectStore, *, run_id: str, policy_id: str) -> None:
        """Sends no request. Raises ValueError for ids that cannot stand in a key."""
        self.run_id = run_id
        self.policy_id = policy_id
        self._store = store
        self._keys = PolicyKeys(run_id, policy_id)
        self._references = References(store, keys=self._keys)
        self._records: list[VersionRecord] = []
        self._next_sequence = 0
        self._owner: Owner | None = None
        self._num_ignored = 0
        self._paths: dict[str, AddedPath] = {}
        self._damaged_paths: tuple[str, ...] = ()
        self._sweeps: set[str] = set()
        self._damaged_sweeps: tuple[str, ...] = ()

    def copy(self) -> "VersionLog":
        """What was read so far, for another owner; nothing is read again."""
        other = VersionLog(self._store, run_id=self.run_id, policy_id=self.policy_id)
        other._records = list(self._records)
        other._next_sequence = self._next_sequence
        other._owner = self._owner
        other._num_ignored = self._num_ignored
        other._paths, other._damaged_paths = dict(self._paths), self._damaged_paths
        other._sweeps, other._damaged_sweeps = set(self._sweeps), self._damaged_sweeps
        return other

    @property
    def next_sequence(self) -> int:
        """First sequence number that this log has not read."""
        return self._next_sequence

    @property
    def owner(self) -> Owner | None:
        """Who may write; None for a log without entries."""
        return self._owner

    @property
    def num_ignored(self) -> int:
        """Entries of writers that had been fenced before."""
        return self._num_ignored

    @property
    def records(self) -> Sequence[VersionRecord]:
        """All known versions; the index is the version."""
        return self._records

    @property
    def damaged_paths(self) -> Sequence[str]:
        """Keys of added paths that the last `refresh` passed over: damaged, or made for another log."""
        return self._damaged_paths

    @property
    def damaged_sweeps(self) -> Sequence[str]:
        """Keys of sweeps that cannot be read: paths that they collected are offered, and prove bad."""
        return self._damaged_sweeps

    def refresh(self) -> int | None:
        """Read what was added, entries and paths, and return the newest version, None when there is none.

        Raises CorruptManifest or IncompatibleError at the first entry that cannot be used, having taken in
        those before it; Unavailable and StoreRefused as the store does.
        """
        # Listings side by side, and reads side by side: far from the store a request costs a round trip.
        with ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="weights-log") as pool:
            prefixes = (self._keys.merged, self._keys.snapshots)
            listings = [pool.submit(self._listed, prefix) for prefix in prefixes]
            swept = pool.submit(self._listed, self._keys.swept)
            newest = self.refresh_entries()
            listed = [key for listing in listings for key in listing.result()]
            self._refresh_paths(listed, pool)
            self._refresh_sweeps(swept.result(), pool)
        return newest

    def refresh_entries(self) -> int | None:
        """`refresh` without the added paths: all that a writer needs to know before it commits."""
        keys = self._new_keys()
        for data in fetch_objects(self._store, keys, threads=_READ_THREADS):
            self.absorb(data)
        return len(self._records) - 1 if self._records else None

    def latest(self) -> VersionRecord | None:
        """The newest known version; asks the store nothing."""
        return self._records[-1] if self._records else None

    def record(self, version: int) -> VersionRecord:
        """A known version. Raises UnknownVersionError: refresh, then ask again."""
        if not 0 <= version < len(self._records):
            raise UnknownVersionError(
                f"version {version} of policy {self.policy_id!r} is not in the log, which ends at "
                f"{len(self._records) - 1}; refresh the log and try again"
            )
        return self._records[version]

    def manifest(self, version: int) -> Manifest:
        """Read the whole manifest of a known version again from the store, with what it refers to.

        Raises UnknownVersionError, CorruptManifest when something of it is gone or changed, Unavailable,
        StoreRefused.
        """
        record = self.record(version)
        key = self._keys.entry(record.sequence)
        try:
            data = self._store.get(key)
        except ObjectNotFound as error:
            raise CorruptManifest(f"log entry {key!r} is gone; entries must never be deleted") from error
        entry = decode_entry(data)
        if sha256(data) != record.manifest_sha256 or not isinstance(entry, ManifestEntry):
            raise CorruptManifest(
                f"log entry {key!r} was changed after it was created; entries must never change"
            )
        return self._references.follow(entry)

    def absorb(self, data: bytes) -> Entry:
        """Take in the bytes of entry `next_sequence`. Raises CorruptManifest and IncompatibleError."""
        entry = decode_entry(data)
        self._check_place(entry)
        epoch, nonce = _writer(entry)
        if self._owner is not None and epoch < self._owner.epoch:
            self._num_ignored += 1
        else:
            if isinstance(entry, ManifestEntry):
                self._records.append(self._record_of(entry, data))
            if self._owner is None or epoch > self._owner.epoch:
                self._owner = Owner(epoch=epoch, nonce=nonce)
        self._next_sequence += 1
        return entry

    def _listed(self, prefix: str) -> list[str]:
        return [info.key for info in self._store.list(prefix)]

    def _content(self, key: str) -> bytes | None:
        try:
            return self._store.get(key)
        except ObjectNotFound:
            return None

    def _refresh_paths(self, listed: Sequence[str], pool: ThreadPoolExecutor) -> None:
        """Believe the listing: paths that were collected are gone, and only new ones are read."""
        new = [key for key in listed if key not in self._paths and key not in self._damaged_paths]
        damaged = [key for key in self._damaged_paths if key in listed]
        paths = {key: self._paths[key] for key in listed if key in self._paths}
        for key, content in zip(new, pool.map(self._content, new), strict=True):
            if content is None:
                # Collected since it was listed.
                continue
            try:
                path = decode_path(content)
            except (CorruptManifest, IncompatibleError):
                damaged.append(key)
                continue
            if path.version >= len(self._records):
                # Made for a version committed since the entries were listed: read again at the next refresh.
                continue
            if self._fits(path, key):
                paths[key] = path
            else:
                damaged.append(key)
        self._paths, self._damaged_paths = paths, tuple(damaged)
        self._take_in_paths()

    def _refresh_sweeps(self, listed: Sequence[str], pool: ThreadPoolExecutor) -> None:
        """Take in what was collected; a sweep is never changed or deleted."""
        new, damaged = [key for key in listed if key not in self._sweeps], []
        for key, content in zip(new, pool.map(self._store.get, new), strict=True):
            try:
                sweep = decode_sweep(self._keys, content)
            except (CorruptManifest, IncompatibleError):
                damaged.append(key)
            else:
                self._take_in_sweep(key, sweep)
        self._damaged_sweeps = tuple(damaged)

    def _take_in_sweep(self, key: str, sweep: Sweep) -> None:
        known = [edge for edge in sweep.paths if edge.version < len(self._records)]
        for edge in known:
            record = self._records[edge.version]
            self._records[edge.version] = replace(record, swept=record.swept | {edge.base_version})
        if len(known) == len(sweep.paths):
            # Else it is about versions committed since the entries were listed: read again at the next refresh.
            self._sweeps.add(key)

    def _fits(self, path: AddedPath, key: str) -> bool:
        here = (path.run_id, path.policy_id) == (self.run_id, self.policy_id)
        root = self._records[path.version].model_root
        return here and path.model_root == root and key == path_key(self._keys, path)

    def _take_in_paths(self) -> None:
        by_version: dict[int, list[AddedPath]] = {}
        for path in self._paths.values():
            by_version.setdefault(path.version, []).append(path)
        for version, record in enumerate(self._records):
            added = tuple(by_version.get(version, ()))
            if added != record.added:
                self._records[version] = replace(record, added=added)

    def _new_keys(self) -> list[str]:
        """Keys of the entries that follow without a gap; a store may list late, but never creates out of
        order.
        """
        after = self._keys.entry(self._next_sequence - 1) if self._next_sequence else self._keys.entries
        listed = {info.key for info in self._store.list(self._keys.entries, after=after)}
        keys: list[str] = []
        while (key := self._keys.entry(self._next_sequence + len(keys))) in listed:
            keys.append(key)
        return keys

    def _check_place(self, entry: Entry) -> None:
        place = (self.run_id, self.policy_id, self._next_sequence)
        if (entry.run_id, entry.policy_id, entry.sequence) != place:
            raise CorruptManifest(
                f"log entry {self._next_sequence} of {self.run_id}/{self.policy_id} says it is entry "
                f"{entry.sequence} of {entry.run_id}/{entry.policy_id}; objects were copied or renamed"
            )

    def _record_of(self, manifest: ManifestEntry, data: bytes) -> VersionRecord:
        if manifest.version != len(self._records):
            raise CorruptManifest(
                f"log entry {manifest.sequence} commits version {manifest.version} "
                f"where {len(self._records)} is due"
            )
        back = manifest.rollback_of
        if back is not None and manifest.model_root != self._records[back].model_root:
            raise CorruptManifest(
                f"log entry {manifest.sequence} goes back to version {back}, whose model root is another one"
            )
        return VersionRecord(
            version=manifest.version,
            sequence=manifest.sequence,
            writer_epoch=manifest.writer_epoch,
            step=manifest.step,
            manifest_sha256=sha256(data),
            model_root=manifest.model_root,
            snapshot=manifest.snapshot,
            deltas=manifest.deltas,
            num_changed=manifest.num_changed,
            num_elements=manifest.num_elements,
            created_time_s=manifest.created_time_s,
            rollback_of=manifest.rollback_of,
        )


def path_key(keys: PolicyKeys, path: AddedPath) -> str:
    """The one key under which an added path counts."""
    if path.base_version is None:
        return keys.snapshot(path.version)
    return keys.merged_delta(path.base_version, path.version)


def _writer(entry: Entry) -> tuple[int, bytes]:
    if isinstance(entry, Fence):
        return entry.epoch, entry.nonce
    return entry.writer_epoch, entry.writer_nonce
