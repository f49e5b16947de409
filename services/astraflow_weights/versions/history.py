"""What the entries of a log say, taken in one after the other: which versions there are, and who may write.

Invariant: every reader of the same entries comes to the same versions: along the sequence epochs never fall, an entry
with an epoch lower than one before it is ignored, and the manifests that remain are numbered 0, 1, 2 … The number that
an entry which nobody can read may have committed is never given to another version. Pure; `VersionLog` feeds it, a
checkpoint of the log holds it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from astraflow_weights.errors import CorruptManifest
from astraflow_weights.versions.manifest import (
    AddedPath,
    DeltaRef,
    Entry,
    Fence,
    Manifest,
    ManifestHead,
    PartRef,
)


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
    damage: str = ""
    """Why nobody can read the entry that may have committed it; such a version offers nothing. Else empty."""

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


@dataclass(frozen=True, kw_only=True)
class Unreadable:
    """An entry that nobody can read; `epoch_before` is the highest one before it."""

    sequence: int
    epoch_before: int
    problem: str


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """The newest entry that could be read, by its number and content."""

    sequence: int
    sha256: bytes


@dataclass(kw_only=True)
class History:
    """State after the entries below `next_sequence`. Starts empty."""

    run_id: str
    policy_id: str
    records: list[VersionRecord] = field(default_factory=list)
    """The index is the version."""
    next_sequence: int = 0
    owner: Owner | None = None
    anchor: Anchor | None = None
    num_ignored: int = 0
    """Entries of writers that had been fenced before."""
    num_spare: int = 0
    """Entries since the newest version that are none: a writer who could not read them left a number out for each."""
    unreadable: dict[int, Unreadable] = field(default_factory=dict)

    def copy(self) -> "History":
        """The same state, which goes on alone."""
        return replace(self, records=list(self.records), unreadable=dict(self.unreadable))

    def latest(self) -> VersionRecord | None:
        """The newest version whose entry can be read."""
        return next((record for record in reversed(self.records) if not record.damage), None)

    def take(self, entry: Entry, digest: bytes) -> None:
        """Take in entry `next_sequence`, whose sha256 is `digest`.

        Raises CorruptManifest for one that contradicts those before it.
        """
        epoch, nonce = _writer(entry)
        is_ignored = self.owner is not None and epoch < self.owner.epoch
        if isinstance(entry, ManifestHead) and not is_ignored:
            self._commit(entry, digest)
        else:
            self.num_spare += 1
        if is_ignored:
            self.num_ignored += 1
        elif self.owner is None or epoch > self.owner.epoch:
            self.owner = Owner(epoch=epoch, nonce=nonce)
        self.anchor = Anchor(sequence=self.next_sequence, sha256=digest)
        self.next_sequence += 1

    def pass_over(self, problem: str) -> None:
        """Go beyond entry `next_sequence`, which nobody can read: it may have committed the next version."""
        self.unreadable[self.next_sequence] = Unreadable(
            sequence=self.next_sequence,
            epoch_before=self.owner.epoch if self.owner else 0,
            problem=problem,
        )
        self.records.append(self._lost(self.next_sequence, problem))
        self.next_sequence += 1

    def take_late(self, entry: Entry | Manifest, digest: bytes) -> None:
        """Take in an entry that was passed over. Raises CorruptManifest for one that contradicts the others."""
        missed = self.unreadable[entry.sequence]
        epoch, nonce = _writer(entry)
        place = self._place_of(entry)
        if isinstance(entry, ManifestHead) and epoch >= missed.epoch_before:
            if place is None or place.version != entry.version:
                raise CorruptManifest(
                    f"log entry {entry.sequence} commits version {entry.version}, which later entries exclude"
                )
            self.records[entry.version] = replace(self._record_of(entry, digest), swept=place.swept)
        elif place is not None and place is self.records[-1]:
            self.records.pop()
            self.num_spare += 1
        if self.owner is None or epoch > self.owner.epoch:
            self.owner = Owner(epoch=epoch, nonce=nonce)
        del self.unreadable[entry.sequence]

    def _place_of(self, entry: Entry | Manifest) -> VersionRecord | None:
        """The version that was kept free for an entry, if one was."""
        if isinstance(entry, ManifestHead) and entry.version < len(self.records):
            record = self.records[entry.version]
            below = self.records[entry.version - 1].sequence if entry.version else -1
            above = self.records[entry.version + 1 : entry.version + 2]
            fits = below < entry.sequence and all(entry.sequence < later.sequence for later in above)
            return record if record.damage and fits else None
        return next((record for record in self.records if record.sequence == entry.sequence), None)

    def _commit(self, manifest: ManifestHead, digest: bytes) -> None:
        kept = len(self.records)
        while kept > manifest.version and self._is_no_version(self.records[kept - 1], manifest):
            kept -= 1
        left_out = range(kept, manifest.version)
        if kept > manifest.version or len(left_out) > self.num_spare:
            raise CorruptManifest(
                f"log entry {manifest.sequence} commits version {manifest.version} "
                f"where {len(self.records)} is due"
            )
        del self.records[kept:]
        for _ in left_out:
            problem = "its number was left out: the next writer could not read an entry"
            self.records.append(self._lost(manifest.sequence - 1, problem))
        self.records.append(self._record_of(manifest, digest))
        self.num_spare = 0

    def _is_no_version(self, record: VersionRecord, successor: ManifestHead) -> bool:
        """Whether a writer who could read more says so, by giving the number to its own version: an entry passed over
        was a fence, or shut out the writer of this record.
        """
        was_shut_out = record.writer_epoch < successor.writer_epoch and any(
            missed.sequence < record.sequence and record.writer_epoch <= missed.epoch_before
            for missed in self.unreadable.values()
        )
        return bool(record.damage) or was_shut_out

    def _lost(self, sequence: int, problem: str) -> VersionRecord:
        before: Sequence[VersionRecord] = self.records[-1:]
        return VersionRecord(
            version=len(self.records),
            sequence=sequence,
            writer_epoch=self.owner.epoch if self.owner else 0,
            step=before[0].step if before else 0,
            manifest_sha256=b"",
            model_root=b"",
            snapshot=None,
            deltas=(),
            num_changed=0,
            num_elements=0,
            created_time_s=before[0].created_time_s if before else 0.0,
            damage=problem,
        )

    def _record_of(self, manifest: ManifestHead, digest: bytes) -> VersionRecord:
        back = None if manifest.rollback_of is None else self.records[manifest.rollback_of]
        if back is not None and not back.damage and manifest.model_root != back.model_root:
            raise CorruptManifest(
                f"log entry {manifest.sequence} goes back to version {back.version}, whose model root is another one"
            )
        return VersionRecord(
            version=manifest.version,
            sequence=manifest.sequence,
            writer_epoch=manifest.writer_epoch,
            step=manifest.step,
            manifest_sha256=digest,
            model_root=manifest.model_root,
            snapshot=manifest.snapshot,
            deltas=manifest.deltas,
            num_changed=manifest.num_changed,
            num_elements=manifest.num_elements,
            created_time_s=manifest.created_time_s,
            rollback_of=manifest.rollback_of,
        )


def _writer(entry: Entry | Manifest) -> tuple[int, bytes]:
    if isinstance(entry, Fence):
        return entry.epoch, entry.nonce
    return entry.writer_epoch, entry.writer_nonce
