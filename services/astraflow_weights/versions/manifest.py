"""Entries of a policy's log, and paths added beside it, as values, and their bytes in the store.

Invariant: what `decode_entry` and `decode_path` return is sealed and consistent in itself: a flipped bit anywhere or a
version without a path to it raise CorruptManifest. What `resolved` returns also has tensors that make its root. Writer,
compactor and log call it; whether an entry counts is the log's business.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from google.protobuf.message import DecodeError, Message
from google.protobuf.timestamp_pb2 import Timestamp

from astraflow.weights.v1 import manifest_pb2
from astraflow_kit.releases import refuse
from astraflow_weights.codec.digest import SHA256_BYTES, TensorDigest, model_root, sha256
from astraflow_weights.codec.schema import Schema
from astraflow_weights.errors import CorruptManifest
from astraflow_weights.store.layout import check_file_name, check_id, check_key
from astraflow_weights.versions.probe import Probe, probe_message, read_probe
from astraflow_weights.versions.references.digest_table import (
    DigestTable,
    KeyTable,
    read_table,
    table_message,
)

SCHEMA_VERSION = 2
NONCE_BYTES = 16
MAX_DELTAS = 16
_SIZES = {
    "writer_nonce": NONCE_BYTES,
    "nonce": NONCE_BYTES,
    "model_root": SHA256_BYTES,
    "schema_sha256": SHA256_BYTES,
}
# The seal is the entry's last field: its tag (number 15, length-delimited) and its length, then 32 bytes.
_SEAL_HEAD = bytes((15 << 3 | 2, SHA256_BYTES))
_SEAL_BYTES = len(_SEAL_HEAD) + SHA256_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRef:
    """An immutable object named by its content; `sha256` is 32 bytes."""

    key: str
    size_bytes: int
    sha256: bytes


@dataclass(frozen=True, kw_only=True)
class Asset:
    """A file that stands beside the weights in a checkpoint."""

    file_name: str
    blob: PartRef


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaRef:
    """Parts that lead here from `base_version`."""

    base_version: int
    parts: tuple[PartRef, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.size_bytes for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class ManifestHead:
    """All of a manifest but its tensors. `snapshot` is None when the version offers none; times are seconds since
    the epoch.
    """

    run_id: str
    policy_id: str
    version: int
    sequence: int
    writer_epoch: int
    writer_nonce: bytes
    step: int
    parent_version: int | None
    snapshot: tuple[PartRef, ...] | None
    deltas: tuple[DeltaRef, ...]
    model_root: bytes
    assets: tuple[Asset, ...] = ()
    num_changed: int = 0
    num_elements: int = 0
    learning_rate: float | None = None
    created_time_s: float = 0.0
    rollback_of: int | None = None
    """Older version with the same tensors, for a rollback; its `step` is then that of the version before it."""
    probe: Probe | None = None
    """What a model with these weights answers; None when nobody computed it."""

    @property
    def density(self) -> float:
        """Changed share of all elements against the parent."""
        return self.num_changed / self.num_elements if self.num_elements else 0.0


@dataclass(frozen=True, kw_only=True)
class ManifestEntry(ManifestHead):
    """A manifest as it stands in the log: schema and digests by reference (`digest_tables`)."""

    schema_sha256: bytes
    table: DigestTable


@dataclass(frozen=True, kw_only=True)
class Manifest(ManifestHead):
    """A manifest whose references were followed: one weight version, whole."""

    tensors: tuple[TensorDigest, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors, unfolded."""
        return sum(tensor.spec.size_bytes for tensor in self.tensors)

    @cached_property
    def schema(self) -> Schema:
        """Of its tensors."""
        return Schema.of(tensor.spec for tensor in self.tensors)

    def entry(self, key: KeyTable | None = None) -> ManifestEntry:
        """How it is written; every digest stands in it unless `key` has most of them."""
        digests = tuple(tensor.digest for tensor in self.tensors)
        return ManifestEntry(
            **_head_fields(self),
            schema_sha256=self.schema.digest,
            table=DigestTable.of(digests, key=key),
        )


def resolved(entry: ManifestEntry, *, schema: Schema, key_digests: Sequence[bytes] | None) -> Manifest:
    """The manifest that an entry refers to. `key_digests` are those of its key manifest, None when it has none.

    Raises CorruptManifest when what it refers to does not make the model root.
    """
    try:
        if schema.digest != entry.schema_sha256:
            raise ValueError("the schema is another one")
        digests = entry.table.digests_of(len(schema.specs), key_digests=key_digests)
        tensors = tuple(
            TensorDigest(spec=spec, digest=digest) for spec, digest in zip(schema.specs, digests, strict=True)
        )
        return _checked(Manifest(**_head_fields(entry), tensors=tensors))
    except ValueError as error:
        raise CorruptManifest(f"log entry {entry.sequence} contradicts itself: {error}") from error


def _head_fields(manifest: ManifestHead) -> dict[str, Any]:
    return {field.name: getattr(manifest, field.name) for field in fields(ManifestHead)}


@dataclass(frozen=True, kw_only=True)
class Fence:
    """A writer's claim on the log."""

    run_id: str
    policy_id: str
    sequence: int
    epoch: int
    nonce: bytes
    previous_epoch: int | None
    created_time_s: float = field(default=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class AddedPath:
    """A snapshot (`base_version` None) or a merged delta that was made after the manifest of its version."""

    run_id: str
    policy_id: str
    version: int
    base_version: int | None
    model_root: bytes
    parts: tuple[PartRef, ...]
    created_time_s: float = 0.0

    @property
    def size_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.size_bytes for part in self.parts)


Entry = ManifestEntry | Fence


def encode_entry(entry: Entry) -> bytes:
    """Sealed bytes of an entry. Equal entries give equal bytes. Raises ValueError for what no reader would
    accept.
    """
    message = manifest_pb2.Entry(schema_version=SCHEMA_VERSION)
    if isinstance(entry, ManifestEntry):
        message.manifest.CopyFrom(_manifest_message(_checked_head(entry)))
    else:
        message.fence.CopyFrom(manifest_pb2.Fence(**_to_fields(entry, manifest_pb2.Fence)))
    return sealed(message)


def encode_path(path: AddedPath) -> bytes:
    """Sealed bytes of an added path. Raises ValueError for what no reader would accept."""
    fields = _to_fields(_checked_path(path), manifest_pb2.AddedPath)
    message = manifest_pb2.AddedPath(**fields, parts=map(_ref_message, path.parts))
    return sealed(manifest_pb2.Entry(schema_version=SCHEMA_VERSION, added_path=message))


def decode_path(data: bytes) -> AddedPath:
    """The added path in `data`. Raises CorruptManifest for damage, IncompatibleError for another schema
    version.
    """
    message = open_entry(data)
    if message.WhichOneof("entry") != "added_path":
        raise CorruptManifest(f"an object of {len(data)} bytes is not an added path")
    try:
        path = message.added_path
        return _checked_path(AddedPath(**_from_fields(path), parts=_refs(path.parts)))
    except ValueError as error:
        raise CorruptManifest(f"an added path of {len(data)} bytes contradicts itself: {error}") from error


def decode_entry(data: bytes) -> Entry:
    """The entry in `data`. Raises CorruptManifest for damage, IncompatibleError for another schema
    version.
    """
    message = open_entry(data)
    try:
        kind = message.WhichOneof("entry")
        if kind == "manifest":
            return _checked_head(_manifest(message.manifest))
        if kind == "fence":
            return Fence(**_from_fields(message.fence))
    except ValueError as error:
        raise CorruptManifest(f"a log entry of {len(data)} bytes contradicts itself: {error}") from error
    raise CorruptManifest(f"a log entry of {len(data)} bytes is neither a manifest nor a fence")


def sealed(message: Message) -> bytes:
    """Bytes of an object of the log, its seal last."""
    content = message.SerializeToString(deterministic=True)
    return content + _SEAL_HEAD + sha256(content)


def open_entry(data: bytes) -> manifest_pb2.Entry:
    """What the bytes hold, its seal checked. Raises CorruptManifest, and IncompatibleError for another schema
    version.
    """
    message = _parsed(data)
    if message.schema_version != SCHEMA_VERSION:
        raise refuse(
            "a log entry of the store",
            format_="log",
            found=message.schema_version,
            reads=[SCHEMA_VERSION],
            otherwise="start a new run",
        )
    return message


def unsealed(data: bytes) -> bytes:
    """Return `data` when its seal belongs to it. Raises CorruptManifest."""
    content, seal = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    if seal != _SEAL_HEAD + sha256(content):
        raise CorruptManifest(f"an object of {len(data)} bytes is damaged: its seal does not match")
    return data


def _parsed(data: bytes) -> manifest_pb2.Entry:
    try:
        return manifest_pb2.Entry.FromString(unsealed(data))
    except DecodeError as error:
        raise CorruptManifest(f"a log entry of {len(data)} bytes cannot be read: {error}") from error


def _manifest_message(manifest: ManifestEntry) -> manifest_pb2.Manifest:
    message = manifest_pb2.Manifest(
        **_to_fields(manifest, manifest_pb2.Manifest),
        deltas=[
            manifest_pb2.Delta(base_version=delta.base_version, parts=map(_ref_message, delta.parts))
            for delta in manifest.deltas
        ],
        digests=table_message(manifest.table),
        assets=[
            manifest_pb2.Asset(file_name=asset.file_name, blob=_ref_message(asset.blob))
            for asset in manifest.assets
        ],
    )
    if manifest.snapshot is not None:
        message.snapshot.parts.extend(map(_ref_message, manifest.snapshot))
    if manifest.probe is not None:
        message.probe.CopyFrom(probe_message(manifest.probe))
    return message


def _plain_fields(kind: Message | type[Message]) -> list[str]:
    """Names of the fields that hold one value."""
    fields = kind.DESCRIPTOR.fields
    return [field.name for field in fields if not field.is_repeated and field.message_type is None]


def _to_fields(record: Entry | AddedPath, kind: type[Message]) -> dict[str, Any]:
    """The plain fields of a message, from attributes of the same names, and its time."""
    fields = {name: getattr(record, name) for name in _plain_fields(kind)}
    return fields | {"created_time": timestamp(record.created_time_s)}


def _from_fields(
    message: manifest_pb2.Manifest | manifest_pb2.Fence | manifest_pb2.AddedPath,
) -> dict[str, Any]:
    """What `_to_fields` was given. Raises ValueError for ids that cannot stand in a key, and for nonces and roots of
    another size.
    """
    fields = {name: optional(message, name) for name in _plain_fields(message)}
    for name in ("run_id", "policy_id"):
        check_id(fields[name], what=name.replace("_", " "))
    for name in _SIZES.keys() & fields.keys():
        sized(fields[name], _SIZES[name], what=name.replace("_", " "))
    return fields | {"created_time_s": message.created_time.ToMicroseconds() / 1e6}


def _ref_message(ref: PartRef) -> manifest_pb2.PartRef:
    return manifest_pb2.PartRef(key=ref.key, size_bytes=ref.size_bytes, sha256=ref.sha256)


def timestamp(seconds: float) -> Timestamp:
    """Seconds since the epoch as a message."""
    stamp = Timestamp()
    stamp.FromMicroseconds(round(seconds * 1e6))
    return stamp


def _manifest(message: manifest_pb2.Manifest) -> ManifestEntry:
    plain = _from_fields(message)
    del plain["density"]  # follows from the counts
    return ManifestEntry(
        **plain,
        snapshot=_refs(message.snapshot.parts) if message.HasField("snapshot") else None,
        deltas=tuple(
            DeltaRef(base_version=delta.base_version, parts=_refs(delta.parts)) for delta in message.deltas
        ),
        table=read_table(message.digests),
        assets=tuple(
            Asset(file_name=check_file_name(asset.file_name), blob=_ref(asset.blob))
            for asset in message.assets
        ),
        probe=read_probe(message.probe) if message.HasField("probe") else None,
    )


def _checked_path(path: AddedPath) -> AddedPath:
    if path.base_version is not None and path.base_version >= path.version:
        raise ValueError(f"a path to version {path.version} starts from version {path.base_version}")
    return path


def _refs(messages: Sequence[manifest_pb2.PartRef]) -> tuple[PartRef, ...]:
    if not messages:
        raise ValueError("a snapshot or delta names no parts")
    return tuple(_ref(message) for message in messages)


def _ref(message: manifest_pb2.PartRef) -> PartRef:
    digest = sized(message.sha256, SHA256_BYTES, what="sha256")
    return PartRef(key=check_key(message.key), size_bytes=message.size_bytes, sha256=digest)


def optional(message: Message, field: str) -> Any:  # noqa: ANN401 - the field's type
    """A field's value; None for an optional one that is unset."""
    is_optional = message.DESCRIPTOR.fields_by_name[field].has_presence
    return None if is_optional and not message.HasField(field) else getattr(message, field)


def sized(value: bytes, size: int, *, what: str) -> bytes:
    """Return `value` when it has `size` bytes. Raises ValueError."""
    if len(value) != size:
        raise ValueError(f"{what} has {len(value)} bytes instead of {size}")
    return value


def _checked_head(manifest: ManifestEntry) -> ManifestEntry:
    files = [asset.file_name for asset in manifest.assets]
    bases = [delta.base_version for delta in manifest.deltas]
    parent = manifest.version - 1 if manifest.version else None
    key = manifest.table.key
    _require_none(
        manifest,
        {
            "asset names repeat": len(files) != len(set(files)),
            "a delta starts from the version itself or later, or repeats": (
                len(bases) > MAX_DELTAS
                or len(bases) != len(set(bases))
                or any(base >= manifest.version for base in bases)
            ),
            "there is neither a snapshot nor a delta": manifest.snapshot is None and not bases,
            f"it follows version {manifest.parent_version}, not {parent}": manifest.parent_version != parent,
            f"it counts {manifest.num_changed} changes": manifest.num_changed > manifest.num_elements,
            f"it goes back to version {manifest.rollback_of}": (
                manifest.rollback_of is not None and manifest.rollback_of >= manifest.version
            ),
            "its learning rate is not a number": math.isnan(manifest.learning_rate or 0.0),
            "its key manifest is not before it": key is not None and key.sequence >= manifest.sequence,
        },
    )
    return manifest


def _checked(manifest: Manifest) -> Manifest:
    elements = sum(tensor.spec.num_elements for tensor in manifest.tensors)
    _require_none(
        manifest,
        {
            "the model root does not belong to the tensors": (
                model_root(manifest.tensors) != manifest.model_root
            ),
            f"it counts {manifest.num_elements} elements of {elements}": manifest.num_elements != elements,
        },
    )
    return manifest


def _require_none(manifest: ManifestHead, complaints: Mapping[str, bool]) -> None:
    for complaint, applies in complaints.items():
        if applies:
            raise ValueError(f"version {manifest.version}: {complaint}")
