"""Entries of a policy's log, and paths added beside it, as values, and their bytes in the store.

Invariant: what `decode_entry` and `decode_path` return is sealed, complete and consistent in itself:
a flipped bit anywhere, a table that does not match its root or a version without a path to it raise
CorruptManifest. Writer, compactor and log call it; whether an entry counts is the log's business.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError, Message
from google.protobuf.timestamp_pb2 import Timestamp

from astraflow.errors import IncompatibleError
from astraflow.weights.v1 import manifest_pb2
from astraflow_weights.codec.digest import SHA256_BYTES, TENSOR_DIGEST_BYTES, TensorDigest, model_root, sha256
from astraflow_weights.codec.tensors import TensorSpec, check_spec
from astraflow_weights.errors import CorruptManifest
from astraflow_weights.store.layout import check_file_name, check_id, check_key
from astraflow_weights.versions.probe import Probe, probe_message, read_probe

SCHEMA_VERSION = 1
NONCE_BYTES = 16
MAX_DELTAS = 16
_SIZES = {"writer_nonce": NONCE_BYTES, "nonce": NONCE_BYTES, "model_root": SHA256_BYTES}
# The seal is the entry's last field: its tag (number 15, length-delimited) and its length, then 32 bytes.
_SEAL_HEAD = bytes((15 << 3 | 2, SHA256_BYTES))
_SEAL_BYTES = len(_SEAL_HEAD) + SHA256_BYTES


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
class DeltaRef:
    """Parts that lead here from `base_version`."""

    base_version: int
    parts: tuple[PartRef, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.size_bytes for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One weight version. `snapshot` is None when the version offers none; times are seconds since the
    epoch.
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
    tensors: tuple[TensorDigest, ...]
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

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors, unfolded."""
        return sum(tensor.spec.size_bytes for tensor in self.tensors)


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


@dataclass(frozen=True, kw_only=True)
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


Entry = Manifest | Fence


def encode_entry(entry: Entry) -> bytes:
    """Sealed bytes of an entry. Equal entries give equal bytes. Raises ValueError for what no reader would
    accept.
    """
    message = manifest_pb2.Entry(schema_version=SCHEMA_VERSION)
    if isinstance(entry, Manifest):
        message.manifest.CopyFrom(_manifest_message(_checked(entry)))
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
            return _checked(_manifest(message.manifest))
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
        raise IncompatibleError(
            f"log entry has schema version {message.schema_version}, this release reads {SCHEMA_VERSION}; "
            "run the release that wrote it, or start a new run"
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


def _manifest_message(manifest: Manifest) -> manifest_pb2.Manifest:
    message = manifest_pb2.Manifest(
        **_to_fields(manifest, manifest_pb2.Manifest),
        deltas=[
            manifest_pb2.Delta(base_version=delta.base_version, parts=map(_ref_message, delta.parts))
            for delta in manifest.deltas
        ],
        tensors=map(_tensor_message, manifest.tensors),
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


def _tensor_message(tensor: TensorDigest) -> manifest_pb2.Tensor:
    spec = tensor.spec
    return manifest_pb2.Tensor(name=spec.name, dtype=spec.dtype, shape=spec.shape, digest=tensor.digest)


def _ref_message(ref: PartRef) -> manifest_pb2.PartRef:
    return manifest_pb2.PartRef(key=ref.key, size_bytes=ref.size_bytes, sha256=ref.sha256)


def timestamp(seconds: float) -> Timestamp:
    """Seconds since the epoch as a message."""
    stamp = Timestamp()
    stamp.FromMicroseconds(round(seconds * 1e6))
    return stamp


def _manifest(message: manifest_pb2.Manifest) -> Manifest:
    fields = _from_fields(message)
    del fields["density"]  # follows from the counts
    return Manifest(
        **fields,
        snapshot=_refs(message.snapshot.parts) if message.HasField("snapshot") else None,
        deltas=tuple(
            DeltaRef(base_version=delta.base_version, parts=_refs(delta.parts)) for delta in message.deltas
        ),
        tensors=tuple(_tensor(tensor) for tensor in message.tensors),
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


def _tensor(message: manifest_pb2.Tensor) -> TensorDigest:
    spec = check_spec(TensorSpec(name=message.name, dtype=message.dtype, shape=tuple(message.shape)))
    return TensorDigest(spec=spec, digest=sized(message.digest, TENSOR_DIGEST_BYTES, what="tensor digest"))


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


def _checked(manifest: Manifest) -> Manifest:
    names = [tensor.spec.name for tensor in manifest.tensors]
    files = [asset.file_name for asset in manifest.assets]
    bases = [delta.base_version for delta in manifest.deltas]
    elements = sum(tensor.spec.num_elements for tensor in manifest.tensors)
    parent = manifest.version - 1 if manifest.version else None
    complaints = {
        "tensors are not sorted by name, or repeat": names != sorted(set(names)) or not names,
        "the model root does not belong to the tensors": model_root(manifest.tensors) != manifest.model_root,
        "asset names repeat": len(files) != len(set(files)),
        "a delta starts from the version itself or later, or repeats": (
            len(bases) > MAX_DELTAS
            or len(bases) != len(set(bases))
            or any(base >= manifest.version for base in bases)
        ),
        "there is neither a snapshot nor a delta": manifest.snapshot is None and not bases,
        f"it follows version {manifest.parent_version}, not {parent}": manifest.parent_version != parent,
        f"it counts {manifest.num_elements} elements of {elements}": manifest.num_elements != elements,
        f"it counts {manifest.num_changed} changes": manifest.num_changed > elements,
        f"it goes back to version {manifest.rollback_of}": (
            manifest.rollback_of is not None and manifest.rollback_of >= manifest.version
        ),
        "its learning rate is not a number": math.isnan(manifest.learning_rate or 0.0),
    }
    for complaint, applies in complaints.items():
        if applies:
            raise ValueError(f"version {manifest.version}: {complaint}")
    return manifest
