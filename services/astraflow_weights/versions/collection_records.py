"""Objects that writers, pullers and collectors leave for each other, as values, and their bytes in the store.

Invariant: what is decoded here is sealed, complete and about the policy that was asked for, else
CorruptManifest. None of them is an entry of the log. `intents`, `leases`, `tombstones` and the collector call
it; docs/weights.md says what each promises.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from astraflow.errors import IncompatibleError
from astraflow.weights.v1 import manifest_pb2
from astraflow_kit.log import get_logger
from astraflow_weights.codec.digest import SHA256_BYTES
from astraflow_weights.errors import CorruptManifest, Edge, ObjectNotFound
from astraflow_weights.store import ObjectStore
from astraflow_weights.store.layout import PolicyKeys, check_key
from astraflow_weights.versions.manifest import (
    NONCE_BYTES,
    SCHEMA_VERSION,
    open_entry,
    optional,
    sealed,
    sized,
    timestamp,
)

log = get_logger(__name__)


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

    `paths` are those of manifests that went with them, `added_paths` the keys of deleted added paths.
    """

    number: int
    kept_parts: frozenset[bytes]
    paths: frozenset[Edge]
    added_paths: tuple[str, ...]
    tombstone_sha256: bytes
    created_time_s: float


def encode_intent(keys: PolicyKeys, intent: UploadIntent) -> bytes:
    """Sealed bytes."""
    message = manifest_pb2.UploadIntent(
        epoch=intent.epoch, nonce=intent.nonce, created_time=timestamp(intent.created_time_s)
    )
    return _sealed(keys, manifest_pb2.Entry(upload_intent=message))


def decode_intent(keys: PolicyKeys, data: bytes) -> UploadIntent:
    """Raises CorruptManifest, IncompatibleError."""
    with _opened(keys, data, kind="upload_intent") as message:
        return UploadIntent(
            epoch=message.epoch,
            nonce=sized(message.nonce, NONCE_BYTES, what="nonce"),
            created_time_s=message.created_time.ToMicroseconds() / 1e6,
        )


def encode_lease(keys: PolicyKeys, lease: PullLease) -> bytes:
    """Sealed bytes."""
    message = manifest_pb2.PullLease(
        holder=lease.holder, parts=sorted(lease.parts), expires_time=timestamp(lease.expires_time_s)
    )
    return _sealed(keys, manifest_pb2.Entry(pull_lease=message))


def decode_lease(keys: PolicyKeys, data: bytes) -> PullLease:
    """Raises CorruptManifest, IncompatibleError."""
    with _opened(keys, data, kind="pull_lease") as message:
        return PullLease(
            holder=sized(message.holder, NONCE_BYTES, what="holder"),
            parts=_names(message.parts),
            expires_time_s=message.expires_time.ToMicroseconds() / 1e6,
        )


def stored_leases(store: ObjectStore, *, keys: PolicyKeys) -> Iterator[tuple[str, PullLease]]:
    """Keys and leases in the store, expired ones, too. Raises Unavailable, StoreRefused.

    One that cannot be read is logged and left out: it protects nobody knows what, and its puller plans around what
    is missing.
    """
    for info in store.list(keys.leases):
        try:
            yield info.key, decode_lease(keys, store.get(info.key))
        except ObjectNotFound:
            # Ended since it was listed.
            continue
        except (CorruptManifest, IncompatibleError) as error:
            log.warning("pull_lease.unreadable", key=info.key, message=str(error))


def encode_tombstone(keys: PolicyKeys, tombstone: Tombstone) -> bytes:
    """Sealed bytes."""
    message = manifest_pb2.Tombstone(
        round=tombstone.number,
        parts=sorted(tombstone.parts),
        created_time=timestamp(tombstone.created_time_s),
    )
    return _sealed(keys, manifest_pb2.Entry(tombstone=message))


def decode_tombstone(keys: PolicyKeys, data: bytes) -> Tombstone:
    """Raises CorruptManifest, IncompatibleError."""
    with _opened(keys, data, kind="tombstone") as message:
        return Tombstone(
            number=message.round,
            parts=_names(message.parts),
            created_time_s=message.created_time.ToMicroseconds() / 1e6,
        )


def encode_sweep(keys: PolicyKeys, sweep: Sweep) -> bytes:
    """Sealed bytes."""
    message = manifest_pb2.Sweep(
        round=sweep.number,
        kept_parts=sorted(sweep.kept_parts),
        added_paths=sweep.added_paths,
        tombstone_sha256=sweep.tombstone_sha256,
        created_time=timestamp(sweep.created_time_s),
    )
    for edge in sorted(sweep.paths, key=lambda edge: (edge.version, edge.base_version or 0)):
        message.paths.add(version=edge.version, base_version=edge.base_version)
    return _sealed(keys, manifest_pb2.Entry(sweep=message))


def decode_sweep(keys: PolicyKeys, data: bytes) -> Sweep:
    """Raises CorruptManifest, IncompatibleError."""
    with _opened(keys, data, kind="sweep") as message:
        return Sweep(
            number=message.round,
            kept_parts=_names(message.kept_parts),
            paths=frozenset(
                Edge(version=path.version, base_version=optional(path, "base_version"))
                for path in message.paths
            ),
            added_paths=tuple(check_key(key) for key in message.added_paths),
            tombstone_sha256=sized(message.tombstone_sha256, SHA256_BYTES, what="sha256 of the tombstone"),
            created_time_s=message.created_time.ToMicroseconds() / 1e6,
        )


def _sealed(keys: PolicyKeys, entry: manifest_pb2.Entry) -> bytes:
    """The record in the entry as one of the policy, sealed."""
    entry.schema_version = SCHEMA_VERSION
    message = getattr(entry, entry.WhichOneof("entry") or "")
    message.run_id, message.policy_id = keys.run_id, keys.policy_id
    return sealed(entry)


@contextmanager
def _opened(keys: PolicyKeys, data: bytes, *, kind: str) -> Iterator[Any]:
    """The message of this kind; a ValueError in the block, which reads it, is a CorruptManifest."""
    entry = open_entry(data)
    if entry.WhichOneof("entry") != kind:
        raise CorruptManifest(f"an object of {len(data)} bytes is not of the kind {kind!r} that its key says")
    message = getattr(entry, kind)
    try:
        if (message.run_id, message.policy_id) != (keys.run_id, keys.policy_id):
            raise ValueError(
                f"it is of {message.run_id}/{message.policy_id}, not of {keys.run_id}/{keys.policy_id}"
            )
        yield message
    except ValueError as error:
        raise CorruptManifest(f"a {kind} of {len(data)} bytes contradicts itself: {error}") from error


def _names(values: Iterable[bytes]) -> frozenset[bytes]:
    return frozenset(sized(value, SHA256_BYTES, what="sha256") for value in values)
