"""Objects that writers, pullers and collectors leave for each other, as values, and their bytes in the store.

Invariant: what is decoded here is sealed, complete and about the policy that was asked for, else
CorruptManifest. None of them is an entry of the log. `intents`, `leases`, `tombstones` and the collector call
it; docs/weights.md says what each promises.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from astraflow.weights.v1 import manifest_pb2
from astraflow_weights.codec.digest import SHA256_BYTES
from astraflow_weights.errors import CorruptManifest, Edge
from astraflow_weights.store.layout import PolicyKeys, check_key
from astraflow_weights.versions.manifest import (
    NONCE_BYTES,
    SCHEMA_VERSION,
    open_entry,
    seal_entry,
    sized,
    timestamp,
)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class UploadIntent:
    """A writer is storing parts that nothing names yet."""

    epoch: int
    nonce: bytes
    created_time_s: float


@dataclass(frozen=True, kw_only=True)
class PullLease:
    """A puller is fetching parts; `parts` are their sha256."""

    holder: bytes
    parts: frozenset[bytes]
    expires_time_s: float


@dataclass(frozen=True, kw_only=True)
class Tombstone:
    """Parts, by sha256, that a round of collection is about to delete."""

    number: int
    parts: frozenset[bytes]
    created_time_s: float


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What a round decided: its tombstone's parts are deleted, those in `kept_parts` excepted.

    `ways` are those of manifests that went with them, `added_ways` the keys of deleted added ways.
    """

    number: int
    kept_parts: frozenset[bytes]
    ways: frozenset[Edge]
    added_ways: tuple[str, ...]
    tombstone_sha256: bytes
    created_time_s: float


def encode_intent(keys: PolicyKeys, intent: UploadIntent) -> bytes:
    """Sealed bytes."""
    message = manifest_pb2.UploadIntent(
        run_id=keys.run_id,
        policy_id=keys.policy_id,
        epoch=intent.epoch,
        nonce=intent.nonce,
        created_time=timestamp(intent.created_time_s),
    )
    return seal_entry(manifest_pb2.Entry(schema_version=SCHEMA_VERSION, upload_intent=message))


def decode_intent(keys: PolicyKeys, data: bytes) -> UploadIntent:
    """Raises CorruptManifest, IncompatibleError."""

    def read(entry: manifest_pb2.Entry) -> UploadIntent:
        message = entry.upload_intent
        _require_ids(keys, message)
        return UploadIntent(
            epoch=message.epoch,
            nonce=sized(message.nonce, NONCE_BYTES, what="nonce"),
            created_time_s=message.created_time.ToMicroseconds() / 1e6,
        )

    return _decoded(data, kind="upload_intent", read=read)


def encode_lease(keys: PolicyKeys, lease: PullLease) -> bytes:
    """Sealed bytes."""
    message = manifest_pb2.PullLease(
        run_id=keys.run_id,
        policy_id=keys.policy_id,
        holder=lease.holder,
        parts=sorted(lease.parts),
        expires_time=timestamp(lease.expires_time_s),
    )
    return seal_entry(manifest_pb2.Entry(schema_version=SCHEMA_VERSION, pull_lease=message))


def decode_lease(keys: PolicyKeys, data: bytes) -> PullLease:
    """Raises CorruptManifest, IncompatibleError."""

    def read(entry: manifest_pb2.Entry) -> PullLease:
        message = entry.pull_lease
        _require_ids(keys, message)
        return PullLease(
            holder=sized(message.holder, NONCE_BYTES, what="holder"),
            parts=_names(message.parts),
            expires_time_s=message.expires_time.ToMicroseconds() / 1e6,
        )

    return _decoded(data, kind="pull_lease", read=read)


def encode_tombstone(keys: PolicyKeys, tombstone: Tombstone) -> bytes:
    """Sealed bytes."""
    message = manifest_pb2.Tombstone(
        run_id=keys.run_id,
        policy_id=keys.policy_id,
        round=tombstone.number,
        parts=sorted(tombstone.parts),
        created_time=timestamp(tombstone.created_time_s),
    )
    return seal_entry(manifest_pb2.Entry(schema_version=SCHEMA_VERSION, tombstone=message))


def decode_tombstone(keys: PolicyKeys, data: bytes) -> Tombstone:
    """Raises CorruptManifest, IncompatibleError."""

    def read(entry: manifest_pb2.Entry) -> Tombstone:
        message = entry.tombstone
        _require_ids(keys, message)
        return Tombstone(
            number=message.round,
            parts=_names(message.parts),
            created_time_s=message.created_time.ToMicroseconds() / 1e6,
        )

    return _decoded(data, kind="tombstone", read=read)


def encode_sweep(keys: PolicyKeys, sweep: Sweep) -> bytes:
    """Sealed bytes."""
    message = manifest_pb2.Sweep(
        run_id=keys.run_id,
        policy_id=keys.policy_id,
        round=sweep.number,
        kept_parts=sorted(sweep.kept_parts),
        added_ways=sweep.added_ways,
        tombstone_sha256=sweep.tombstone_sha256,
        created_time=timestamp(sweep.created_time_s),
    )
    for edge in sorted(sweep.ways, key=lambda edge: (edge.version, edge.base_version or 0)):
        message.ways.add(version=edge.version, base_version=edge.base_version)
    return seal_entry(manifest_pb2.Entry(schema_version=SCHEMA_VERSION, sweep=message))


def decode_sweep(keys: PolicyKeys, data: bytes) -> Sweep:
    """Raises CorruptManifest, IncompatibleError."""

    def read(entry: manifest_pb2.Entry) -> Sweep:
        message = entry.sweep
        _require_ids(keys, message)
        return Sweep(
            number=message.round,
            kept_parts=_names(message.kept_parts),
            ways=frozenset(
                Edge(
                    version=way.version,
                    base_version=way.base_version if way.HasField("base_version") else None,
                )
                for way in message.ways
            ),
            added_ways=tuple(check_key(key) for key in message.added_ways),
            tombstone_sha256=sized(message.tombstone_sha256, SHA256_BYTES, what="sha256 of the tombstone"),
            created_time_s=message.created_time.ToMicroseconds() / 1e6,
        )

    return _decoded(data, kind="sweep", read=read)


def _decoded(data: bytes, *, kind: str, read: Callable[[manifest_pb2.Entry], T]) -> T:
    entry = open_entry(data)
    if entry.WhichOneof("entry") != kind:
        raise CorruptManifest(f"an object of {len(data)} bytes is not of the kind {kind!r} that its key says")
    try:
        return read(entry)
    except ValueError as error:
        raise CorruptManifest(f"a {kind} of {len(data)} bytes contradicts itself: {error}") from error


def _require_ids(
    keys: PolicyKeys,
    message: manifest_pb2.UploadIntent | manifest_pb2.PullLease | manifest_pb2.Tombstone | manifest_pb2.Sweep,
) -> None:
    if (message.run_id, message.policy_id) != (keys.run_id, keys.policy_id):
        raise ValueError(
            f"it is of {message.run_id}/{message.policy_id}, not of {keys.run_id}/{keys.policy_id}"
        )


def _names(values: Iterable[bytes]) -> frozenset[bytes]:
    return frozenset(sized(value, SHA256_BYTES, what="sha256") for value in values)
