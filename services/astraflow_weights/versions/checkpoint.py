"""Checkpoints of a log: its history up to an entry as one object, so that nobody reads thousands of them.

Invariant: what is decoded here is sealed, of the policy that was asked for and consistent in itself, else
CorruptManifest; it says what the entries below `next_sequence` say, and counts only beside a log that has the entry of
its anchor. Derived from the log, never the only place of anything that a reader must have. `VersionLog` begins at the
newest one, the compactor writes them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from astraflow.errors import IncompatibleError
from astraflow.weights.v1 import log_checkpoint_pb2 as pb
from astraflow_weights.codec.digest import SHA256_BYTES
from astraflow_weights.errors import CorruptManifest
from astraflow_weights.store.layout import PolicyKeys
from astraflow_weights.versions.history import Anchor, History, Owner, Unreadable, VersionRecord
from astraflow_weights.versions.manifest import (
    NONCE_BYTES,
    AddedPath,
    DeltaRef,
    PartRef,
    decode_path,
    encode_path,
    optional,
    sealed,
    sized,
    timestamp,
    unsealed,
)

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class LogCheckpoint:
    """`history` without added paths; those that were there, and the first round whose sweep is not taken in."""

    history: History
    paths: tuple[AddedPath, ...]
    next_round: int


def encode_checkpoint(checkpoint: LogCheckpoint) -> bytes:
    """Sealed bytes. Raises ValueError for a log without an entry that can be read."""
    history = checkpoint.history
    if history.anchor is None or history.owner is None:
        raise ValueError("a log without an entry that can be read has nothing to keep")
    message = pb.LogCheckpoint(
        schema_version=SCHEMA_VERSION,
        run_id=history.run_id,
        policy_id=history.policy_id,
        next_sequence=history.next_sequence,
        anchor_sequence=history.anchor.sequence,
        anchor_sha256=history.anchor.sha256,
        owner_epoch=history.owner.epoch,
        owner_nonce=history.owner.nonce,
        num_ignored=history.num_ignored,
        num_spare=history.num_spare,
        versions=map(_summary, history.records),
        unreadable=[
            pb.UnreadableEntry(sequence=each.sequence, epoch_before=each.epoch_before, problem=each.problem)
            for each in history.unreadable.values()
        ],
        added_paths=map(encode_path, checkpoint.paths),
        next_round=checkpoint.next_round,
    )
    return sealed(message)


def decode_checkpoint(keys: PolicyKeys, data: bytes) -> LogCheckpoint:
    """Raises CorruptManifest, and IncompatibleError for another schema version."""
    try:
        message = pb.LogCheckpoint.FromString(unsealed(data))
    except DecodeError as error:
        raise CorruptManifest(f"a checkpoint of {len(data)} bytes cannot be read: {error}") from error
    if message.schema_version != SCHEMA_VERSION:
        raise IncompatibleError(
            f"checkpoint has schema version {message.schema_version}, this release reads {SCHEMA_VERSION}"
        )
    try:
        return LogCheckpoint(
            history=_history(keys, message),
            paths=tuple(map(decode_path, message.added_paths)),
            next_round=message.next_round,
        )
    except ValueError as error:
        raise CorruptManifest(f"a checkpoint of {len(data)} bytes contradicts itself: {error}") from error


def _history(keys: PolicyKeys, message: pb.LogCheckpoint) -> History:
    if (message.run_id, message.policy_id) != (keys.run_id, keys.policy_id):
        raise ValueError(f"it is of {message.run_id}/{message.policy_id}")
    records = [_record(keys, version, summary) for version, summary in enumerate(message.versions)]
    epochs = [record.writer_epoch for record in records]
    anchor = Anchor(
        sequence=message.anchor_sequence, sha256=sized(message.anchor_sha256, SHA256_BYTES, what="anchor")
    )
    if epochs != sorted(epochs) or anchor.sequence >= message.next_sequence:
        raise ValueError("epochs fall, or its anchor is not below what it takes in")
    return History(
        run_id=message.run_id,
        policy_id=message.policy_id,
        records=records,
        next_sequence=message.next_sequence,
        owner=Owner(epoch=message.owner_epoch, nonce=sized(message.owner_nonce, NONCE_BYTES, what="nonce")),
        anchor=anchor,
        num_ignored=message.num_ignored,
        num_spare=message.num_spare,
        unreadable={
            each.sequence: Unreadable(
                sequence=each.sequence, epoch_before=each.epoch_before, problem=each.problem
            )
            for each in message.unreadable
        },
    )


def _summary(record: VersionRecord) -> pb.VersionSummary:
    return pb.VersionSummary(
        sequence=record.sequence,
        writer_epoch=record.writer_epoch,
        step=record.step,
        manifest_sha256=record.manifest_sha256,
        model_root=record.model_root,
        paths=[_path(base, parts, swept=base in record.swept) for base, parts in _manifest_paths(record)],
        num_changed=record.num_changed,
        num_elements=record.num_elements,
        created_time=timestamp(record.created_time_s),
        rollback_of=record.rollback_of,
        damage=record.damage,
    )


def _manifest_paths(record: VersionRecord) -> Iterator[tuple[int | None, tuple[PartRef, ...]]]:
    if record.snapshot is not None:
        yield None, record.snapshot
    for delta in record.deltas:
        yield delta.base_version, delta.parts


def _path(base_version: int | None, parts: Iterable[PartRef], *, swept: bool) -> pb.PathSummary:
    return pb.PathSummary(
        base_version=base_version,
        part_sha256s=b"".join(part.sha256 for part in parts),
        part_sizes=[part.size_bytes for part in parts],
        swept=swept,
    )


def _record(keys: PolicyKeys, version: int, summary: pb.VersionSummary) -> VersionRecord:
    paths = {optional(path, "base_version"): path for path in summary.paths}
    digest_bytes = 0 if summary.damage else SHA256_BYTES
    back = optional(summary, "rollback_of")
    if any(base is not None and base >= version for base in (*paths, back)):
        raise ValueError(f"version {version} starts from itself or later")
    return VersionRecord(
        version=version,
        sequence=summary.sequence,
        writer_epoch=summary.writer_epoch,
        step=summary.step,
        manifest_sha256=sized(summary.manifest_sha256, digest_bytes, what="manifest sha256"),
        model_root=sized(summary.model_root, digest_bytes, what="model root"),
        snapshot=_parts(keys, paths[None]) if None in paths else None,
        deltas=tuple(
            DeltaRef(base_version=base, parts=_parts(keys, path))
            for base, path in paths.items()
            if base is not None
        ),
        num_changed=summary.num_changed,
        num_elements=summary.num_elements,
        created_time_s=summary.created_time.ToMicroseconds() / 1e6,
        rollback_of=back,
        swept=frozenset(base for base, path in paths.items() if path.swept),
        damage=summary.damage,
    )


def _parts(keys: PolicyKeys, path: pb.PathSummary) -> tuple[PartRef, ...]:
    names = path.part_sha256s
    sized(names, SHA256_BYTES * len(path.part_sizes), what="list of parts")
    cut = (names[at : at + SHA256_BYTES] for at in range(0, len(names), SHA256_BYTES))
    return tuple(
        PartRef(key=keys.part(name.hex()), size_bytes=size, sha256=name)
        for name, size in zip(cut, path.part_sizes, strict=True)
    )
