"""What a policy's log in a store holds, checked to the last bit: for tests that killed somebody.

`take` walks every entry and fails naming all it found wrong: a visible manifest that names a part or asset which
is missing or damaged (a torn version), a version that cannot be rebuilt to its model root, entries with gaps, an
epoch that falls, two writers under one epoch. Stray parts without a manifest are what a killed upload leaves: they
are counted, never an error.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from astraflow_weights.codec import Array, apply_delta, decode_snapshot
from astraflow_weights.codec.digest import model_root, sha256
from astraflow_weights.codec.tensor_hash import tensor_digests
from astraflow_weights.errors import CorruptPart, ObjectNotFound
from astraflow_weights.store import ObjectStore
from astraflow_weights.store.layout import PolicyKeys
from astraflow_weights.versions.history import VersionRecord
from astraflow_weights.versions.log import VersionLog
from astraflow_weights.versions.manifest import Entry, Fence, Manifest, PartRef, decode_entry


@dataclass(frozen=True, kw_only=True)
class Census:
    """A log in which nothing is wrong."""

    records: Sequence[VersionRecord]
    """Versions that readers see, in order."""
    entries: Sequence[Entry]
    """Everything in the sequence, ignored entries too."""
    num_ignored: int
    """Entries of writers that had been fenced before."""
    num_stray_parts: int
    """Parts that no visible manifest names."""

    @property
    def steps(self) -> list[int]:
        """Step of each version."""
        return [record.step for record in self.records]

    @property
    def epochs(self) -> list[int]:
        """Writer epoch of each version."""
        return [record.writer_epoch for record in self.records]


def take(store: ObjectStore, *, run_id: str, policy_id: str) -> Census:
    """Walk the log. Raises AssertionError naming everything that is wrong."""
    log = VersionLog(store, run_id=run_id, policy_id=policy_id)
    log.refresh()
    keys = PolicyKeys(run_id, policy_id)
    listed = [info.key for info in store.list(keys.entries)]
    entries = [decode_entry(store.get(key)) for key in listed]
    manifests = [log.manifest(record.version) for record in log.records if not record.damage]
    wrong = [
        *_sequence_faults(listed, keys=keys, log=log),
        *(f"entry {key} cannot be read: {problem}" for key, problem in log.unreadable.items()),
        *(f"checkpoint {key} is damaged" for key in log.damaged_checkpoints),
        *_epoch_faults(log.records, entries),
        *(fault for manifest in manifests for fault in _object_faults(store, manifest)),
        *(f"added path {key} is damaged or leads elsewhere" for key in log.damaged_paths),
        *(fault for record in log.records for fault in _added_faults(store, record)),
    ]
    assert not wrong, "\n".join(wrong)
    wrong = list(_chain_faults(store, manifests))
    assert not wrong, "\n".join(wrong)
    named = {part.key for manifest in manifests for part in _parts(manifest)}
    named |= {part.key for record in log.records for path in record.added for part in path.parts}
    stray = [info.key for info in store.list(keys.parts) if info.key not in named]
    return Census(
        records=log.records, entries=entries, num_ignored=log.num_ignored, num_stray_parts=len(stray)
    )


def _sequence_faults(listed: Sequence[str], *, keys: PolicyKeys, log: VersionLog) -> Iterator[str]:
    expected = [keys.entry(number) for number in range(log.next_sequence)]
    if list(listed) != expected:
        yield f"the log has entries {sorted(set(listed) ^ set(expected))} beyond a gap or outside its sequence"


def _epoch_faults(records: Sequence[VersionRecord], entries: Sequence[Entry]) -> Iterator[str]:
    epochs = [record.writer_epoch for record in records]
    if epochs != sorted(epochs):
        yield f"epochs fall along the versions: {epochs}"
    nonces: dict[int, set[bytes]] = {}
    visible = {record.sequence for record in records}
    for entry in entries:
        if isinstance(entry, Fence):
            continue
        if entry.sequence in visible:
            nonces.setdefault(entry.writer_epoch, set()).add(entry.writer_nonce)
    for epoch, writers in nonces.items():
        if len(writers) > 1:
            yield f"{len(writers)} writers made versions under epoch {epoch}"


def _object_faults(store: ObjectStore, manifest: Manifest) -> Iterator[str]:
    refs = [*_parts(manifest), *(asset.blob for asset in manifest.assets)]
    yield from _ref_faults(store, refs, version=manifest.version)


def _added_faults(store: ObjectStore, record: VersionRecord) -> Iterator[str]:
    for path in record.added:
        yield from _ref_faults(store, path.parts, version=record.version)


def _ref_faults(store: ObjectStore, refs: Sequence[PartRef], *, version: int) -> Iterator[str]:
    for ref in refs:
        try:
            data = store.get(ref.key)
        except ObjectNotFound:
            yield f"version {version} is torn: {ref.key} is missing"
            continue
        if len(data) != ref.size_bytes or sha256(data) != ref.sha256:
            yield f"version {version} is torn: {ref.key} is damaged"


def _chain_faults(store: ObjectStore, manifests: Sequence[Manifest]) -> Iterator[str]:
    model: dict[str, Array] = {}
    for manifest in manifests:
        try:
            model = _rebuilt(store, manifest, before=model)
        except CorruptPart as error:
            yield f"version {manifest.version} cannot be rebuilt: {error}"
            return
        if model_root(tensor_digests(model)) != manifest.model_root:
            yield f"version {manifest.version} is rebuilt to another model than its manifest says"
            return


def _rebuilt(store: ObjectStore, manifest: Manifest, *, before: dict[str, Array]) -> dict[str, Array]:
    """The version by its delta when it has one, which a snapshot must agree with; else by its snapshot."""
    snapshot = (
        decode_snapshot(_bytes(store, manifest.snapshot), schema=manifest.schema)
        if manifest.snapshot
        else None
    )
    for delta in manifest.deltas:
        if delta.base_version == manifest.version - 1:
            apply_delta(before, _bytes(store, delta.parts))
            agrees = snapshot is None or tensor_digests(snapshot) == tensor_digests(before)
            if not agrees:
                raise CorruptPart("its delta and its snapshot hold different models")
            return before
    if snapshot is None:
        raise CorruptPart("it has neither a snapshot nor a delta from the version before")
    return snapshot


def _bytes(store: ObjectStore, parts: Sequence[PartRef]) -> list[bytes]:
    return [store.get(part.key) for part in parts]


def _parts(manifest: Manifest) -> list[PartRef]:
    return [*(manifest.snapshot or ()), *(part for delta in manifest.deltas for part in delta.parts)]
