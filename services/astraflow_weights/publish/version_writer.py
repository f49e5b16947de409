"""The one writer of a policy's log: fence, upload, commit.

Invariant: a writer commits only while its fence is the newest; its manifests name only parts that exist and
follow each other without gaps, however often it crashed or lost an answer. A trainer opens one writer per
claimed epoch, `ShardPublisher` drives it.
"""

import contextlib
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from astraflow.weights.v1 import manifest_pb2
from astraflow_kit import failpoints
from astraflow_kit.clock import Clock, SystemClock
from astraflow_weights.codec.digest import TensorDigest, model_root
from astraflow_weights.codec.schema import Schema
from astraflow_weights.errors import Fenced, ObjectNotFound, Unavailable
from astraflow_weights.publish.compaction import wants_snapshot
from astraflow_weights.publish.uploads import Uploads
from astraflow_weights.settings import PublishSettings
from astraflow_weights.store import ObjectStore, PutResult
from astraflow_weights.store.layout import PolicyKeys
from astraflow_weights.versions.history import Owner, VersionRecord
from astraflow_weights.versions.intents import UploadIntents
from astraflow_weights.versions.log import VersionLog
from astraflow_weights.versions.manifest import (
    NONCE_BYTES,
    Asset,
    DeltaRef,
    Entry,
    Fence,
    ManifestEntry,
    PartRef,
    encode_entry,
)
from astraflow_weights.versions.probe import Probe
from astraflow_weights.versions.references.digest_table import DigestTable, KeyRef, KeyTable

# So many entries at most refer to one key manifest: that many versions are lost to those who hold none of them when it
# rots.
_KEY_EVERY = 64


@dataclass(frozen=True, kw_only=True)
class CommittedVersion:
    """A version that is in the log. `existed` tells that an earlier call had committed it.

    `hint_written` is False when the `latest` hint could not be updated, which matters to nobody's
    correctness.
    """

    version: int
    sequence: int
    manifest_sha256: bytes
    model_root: bytes
    writer_epoch: int
    step: int
    snapshot_bytes: int
    delta_bytes: int
    num_changed: int
    num_elements: int
    rollback_of: int | None
    existed: bool
    hint_written: bool = True

    @property
    def density(self) -> float:
        """Changed share of all elements against the parent."""
        return self.num_changed / self.num_elements if self.num_elements else 0.0


class VersionWriter:
    """Commits versions of one policy under one epoch. One owner per object: not thread-safe.

    writer = VersionWriter.open(store, run_id="r1", policy_id="solver", epoch=claimed.epoch)
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        log: VersionLog,
        owner: Owner,
        settings: PublishSettings,
        clock: Clock,
    ) -> None:
        """For `open`, which also writes the fence."""
        self.log = log
        self._store = store
        self._keys = PolicyKeys(log.run_id, log.policy_id)
        self._owner = owner
        self._settings = settings
        self._clock = clock
        self.uploads = Uploads(store, keys=self._keys, threads=settings.upload_threads)
        self._intents = UploadIntents(store, keys=self._keys, clock=clock)
        self._key: KeyTable | None = None

    @classmethod
    def open(
        cls,
        store: ObjectStore,
        *,
        run_id: str,
        policy_id: str,
        epoch: int,
        nonce: bytes | None = None,
        settings: PublishSettings | None = None,
        clock: Clock | None = None,
        log: VersionLog | None = None,
    ) -> "VersionWriter":
        """Read the log and fence out every writer with a lower epoch.

        Idempotent for one (epoch, nonce); the nonce (16 bytes) is drawn when not given. What `log` has read is not
        read again; it is the writer's from now on. Raises Fenced when
        the epoch was used by another writer or is not the highest, Unavailable, StoreRefused,
        CorruptManifest.
        """
        nonce = nonce or secrets.token_bytes(NONCE_BYTES)
        if epoch < 0 or len(nonce) != NONCE_BYTES:
            raise ValueError(
                f"epoch {epoch} must be at least 0 and the nonce {NONCE_BYTES} bytes, not {len(nonce)}"
            )
        writer = cls(
            store,
            log=log or VersionLog(store, run_id=run_id, policy_id=policy_id),
            owner=Owner(epoch=epoch, nonce=nonce),
            settings=settings or PublishSettings(),
            clock=clock or SystemClock(),
        )
        writer._fence()
        return writer

    @property
    def epoch(self) -> int:
        """Epoch this writer commits under."""
        return self._owner.epoch

    @property
    def newest(self) -> CommittedVersion | None:
        """The newest version in the log as last read; None when there is none."""
        record = self.log.latest()
        return None if record is None else _committed(record, existed=True)

    def committed_since(self, version: int | None) -> list[CommittedVersion]:
        """The versions in the log as last read after `version` that can be read, in order; all of them for None."""
        first = 0 if version is None else version + 1
        return [_committed(record, existed=True) for record in self.log.records[first:] if not record.damage]

    def wants_snapshot(self, *, delta_bytes: int | None) -> bool:
        """Whether the next version should offer a snapshot, given the bytes of its delta (None: it has
        none).
        """
        return wants_snapshot(self.log.records, delta_bytes=delta_bytes, settings=self._settings)

    def find(self, *, step: int, root: bytes, rollback_of: int | None = None) -> CommittedVersion | None:
        """Refresh the log; the newest version of this step with these bytes, if there is one.

        Raises Fenced when another writer took over. This is how a resumed or repeated publication ends in
        success. A rollback is no publication of its step; only the newest version may be one that was asked for.
        """
        self.log.refresh_entries()
        self._require_ownership()
        wanted = (step, root, rollback_of)
        candidates = self.log.records if rollback_of is None else self.log.records[-1:]
        for record in reversed(candidates):
            if (record.step, record.model_root, record.rollback_of) == wanted:
                return _committed(record, existed=True)
        return None

    def announce_uploads(self) -> None:
        """Say that parts are coming which nothing names yet; every process then reads the tombstones.

        End it with `end_uploads`, whatever happens. Raises as the store does.
        """
        self._intents.open(epoch=self.epoch)

    def end_uploads(self) -> None:
        """What was announced is committed, or given up. While that is undecided the notice stays."""
        self._intents.close()

    @contextlib.contextmanager
    def uploading(self) -> Iterator[None]:
        """Both around the block, for a writer that is one process: uploads in it are safe from collectors."""
        try:
            self.announce_uploads()
            self.uploads.read_tombstones()
            yield
        finally:
            self.end_uploads()

    def _renew_announcement(self, refs: Iterable[PartRef]) -> None:
        """Before a commit that took long: none of its parts may have been given up to a collector since."""
        if not self._intents.aged:
            return
        self._intents.open(epoch=self.epoch)
        buried = self.uploads.read_tombstones()
        if any(ref.sha256 in buried for ref in refs):
            raise Unavailable(
                "the upload took so long that a collector may have deleted some of its parts; publish again"
            )

    def commit(
        self,
        *,
        step: int,
        tensors: tuple[TensorDigest, ...],
        snapshot: tuple[PartRef, ...] | None = None,
        deltas: tuple[DeltaRef, ...] = (),
        assets: tuple[Asset, ...] = (),
        num_changed: int = 0,
        learning_rate: float | None = None,
        rollback_of: int | None = None,
        probe: Probe | None = None,
    ) -> CommittedVersion:
        """Make the next version visible, atomically. All it names is uploaded; `tensors` is sorted by name.

        The same (step, model root) again returns what exists. Raises Fenced, Unavailable (call again), ValueError.
        """
        root, due = model_root(tensors), len(self.log.records)
        if (existing := self.find(step=step, root=root, rollback_of=rollback_of)) is not None:
            return existing
        self._renew_announcement([*(snapshot or ()), *(part for delta in deltas for part in delta.parts)])
        referring = self._referring(tensors)
        self._intents.commit_begins()
        failpoints.hit("weights.publish.before_manifest")
        data = self._append(
            lambda sequence: ManifestEntry(
                **referring,
                run_id=self.log.run_id,
                policy_id=self.log.policy_id,
                version=due,
                sequence=sequence,
                writer_epoch=self._owner.epoch,
                writer_nonce=self._owner.nonce,
                step=step,
                parent_version=due - 1 if due else None,
                snapshot=snapshot,
                deltas=deltas,
                model_root=root,
                assets=assets,
                num_changed=num_changed,
                learning_rate=learning_rate,
                created_time_s=self._clock.wall_time_s(),
                rollback_of=rollback_of,
                probe=probe,
            )
        )
        self._intents.commit_ended()
        failpoints.hit("weights.publish.after_manifest")
        record = self._committed_record(**referring)
        return _committed(record, existed=False, hint_written=self._write_hint(record, data))

    def _referring(self, tensors: tuple[TensorDigest, ...]) -> dict[str, Any]:
        """What a manifest says of its tensors; their schema is stored."""
        schema = Schema.of(tensor.spec for tensor in tensors)
        self.uploads.upload_schema(schema)
        return {
            "schema_sha256": schema.digest,
            "table": DigestTable.of([tensor.digest for tensor in tensors], key=self._key_for(schema)),
            "num_elements": sum(tensor.spec.num_elements for tensor in tensors),
        }

    def _committed_record(
        self, *, schema_sha256: bytes, table: DigestTable, num_elements: int
    ) -> VersionRecord:
        """The version that was just made, to which later ones may refer."""
        record = self.log.records[-1]
        assert record.num_elements == num_elements
        if table.key is None:
            ref = KeyRef(sequence=record.sequence, sha256=record.manifest_sha256)
            self._key = KeyTable(ref=ref, schema_sha256=schema_sha256, digests=table.digests)
        return record

    def _key_for(self, schema: Schema) -> KeyTable | None:
        """What the next manifest may refer to: this writer's last key manifest, unless that is old."""
        key = self._key
        if key is None or key.schema_sha256 != schema.digest:
            return None
        return key if self.log.next_sequence - key.ref.sequence < _KEY_EVERY else None

    def _fence(self) -> None:
        self.log.refresh()
        if self.log.owner == self._owner:
            return
        if self.log.owner is not None and self.log.owner.epoch >= self.epoch:
            raise self._fenced()
        self._append(
            lambda sequence: Fence(
                run_id=self.log.run_id,
                policy_id=self.log.policy_id,
                sequence=sequence,
                epoch=self._owner.epoch,
                nonce=self._owner.nonce,
                previous_epoch=self.log.owner.epoch if self.log.owner else None,
                created_time_s=self._clock.wall_time_s(),
            )
        )

    def _append(self, make: Callable[[int], Entry]) -> bytes:
        """Create the entry at the next free number; its bytes. Raises Fenced as soon as somebody else's epoch is not
        lower, Unavailable when its version is not the next one any more: an entry that nobody can read may be it.
        """
        for _ in range(self._settings.commit_attempts):
            key = self._keys.entry(self.log.next_sequence)
            wanted = make(self.log.next_sequence)
            if isinstance(wanted, ManifestEntry) and wanted.version != len(self.log.records):
                raise Unavailable(
                    f"an entry that cannot be read may be version {wanted.version}; publish again under the next number"
                )
            data = self._create_or_read(key, encode_entry(wanted))
            found = self.log.absorb(data)
            # Our own entry, perhaps with an older time: an earlier attempt arrived and its answer was lost.
            if found is not None and replace(found, created_time_s=wanted.created_time_s) == wanted:
                return data
            if self.log.owner is not None and self.log.owner.epoch >= self.epoch:
                self._require_ownership()
        raise Unavailable(
            f"{self._settings.commit_attempts} entries in a row of {self._keys.entries!r} were taken by "
            "other writers; stop the old trainers of this policy"
        )

    def _create_or_read(self, key: str, data: bytes) -> bytes:
        """What the entry holds after trying to create it: `data`, or what somebody else had put there."""
        try:
            created = self._store.put_if_absent(key, data) is PutResult.CREATED
        except Unavailable as lost_answer:
            # Perhaps only the answer was lost: the store knows.
            try:
                return self._store.get(key)
            except ObjectNotFound:
                raise lost_answer from None
        return data if created else self._store.get(key)

    def _require_ownership(self) -> None:
        if self.log.owner != self._owner:
            raise self._fenced()

    def _fenced(self) -> Fenced:
        holder = self.log.owner.epoch if self.log.owner else None
        return Fenced(
            f"policy {self.log.policy_id!r} of run {self.log.run_id!r} is written under epoch {holder}; "
            f"this writer has epoch {self.epoch} and must stop: claim the policy again for a new epoch"
        )

    def _write_hint(self, record: VersionRecord, data: bytes) -> bool:
        hint = manifest_pb2.LatestHint(version=record.version, sequence=record.sequence, entry=data)
        # The version is committed; failing now would make the caller doubt it.
        with contextlib.suppress(Unavailable):
            self._store.put(self._keys.latest, hint.SerializeToString(deterministic=True))
            return True
        return False


def _committed(record: VersionRecord, *, existed: bool, hint_written: bool = True) -> CommittedVersion:
    return CommittedVersion(
        version=record.version,
        sequence=record.sequence,
        manifest_sha256=record.manifest_sha256,
        model_root=record.model_root,
        writer_epoch=record.writer_epoch,
        step=record.step,
        snapshot_bytes=record.snapshot_bytes,
        delta_bytes=record.delta_bytes,
        num_changed=record.num_changed,
        num_elements=record.num_elements,
        rollback_of=record.rollback_of,
        existed=existed,
        hint_written=hint_written,
    )
