"""Records of a log as values, for tests of what follows from them alone; nothing they name is in a store."""

from collections.abc import Mapping
from typing import Any

from astraflow_weights.codec.digest import model_root
from astraflow_weights.codec.tensor_hash import tensor_digests
from astraflow_weights.versions.history import VersionRecord
from astraflow_weights.versions.manifest import (
    AddedPath,
    DeltaRef,
    Fence,
    Manifest,
    ManifestEntry,
    PartRef,
)
from support.weight_models import KEYS, POLICY, RUN, make_model

ROOT = b"r" * 32
TENSORS = tensor_digests(make_model())
PART = PartRef(key=KEYS.part("ab"), size_bytes=10, sha256=b"s" * 32)


def nonce(epoch: int) -> bytes:
    """The one of the writer of an epoch."""
    return epoch.to_bytes(16, "big")


def fence(sequence: int, *, epoch: int = 1) -> Fence:
    """What the writer of an epoch begins with."""
    return Fence(
        run_id=RUN, policy_id=POLICY, sequence=sequence, epoch=epoch, nonce=nonce(epoch), previous_epoch=None
    )


def manifest(sequence: int, *, version: int, epoch: int = 1, **others: Any) -> ManifestEntry:
    """A version of `make_model` with a snapshot of one part, or with what `others` names, as it stands in the log."""
    known: dict[str, Any] = {
        "run_id": RUN,
        "policy_id": POLICY,
        "version": version,
        "sequence": sequence,
        "writer_epoch": epoch,
        "writer_nonce": nonce(epoch),
        "step": version,
        "parent_version": version - 1 if version else None,
        "snapshot": (PART,),
        "deltas": (),
        "tensors": TENSORS,
        "model_root": model_root(TENSORS),
        "num_elements": sum(tensor.spec.num_elements for tensor in TENSORS),
    }
    return Manifest(**(known | others)).entry()


def part_ref(size_bytes: int) -> PartRef:
    """A part of this size."""
    return PartRef(key="k", size_bytes=size_bytes, sha256=b"s" * 32)


def added_path(version: int, *, base: int | None, size_bytes: int, root: bytes = ROOT) -> AddedPath:
    """A path of one part that was made after its version."""
    return AddedPath(
        run_id=RUN,
        policy_id=POLICY,
        version=version,
        base_version=base,
        model_root=root,
        parts=(part_ref(size_bytes),),
    )


def version_record(version: int, *, snapshot: int | None, deltas: Mapping[int, int]) -> VersionRecord:
    """A version by the sizes of its snapshot and of its deltas by base; those from older bases were merged later."""
    merged = {base: size for base, size in deltas.items() if base != version - 1}
    own = deltas.keys() - merged
    return VersionRecord(
        version=version,
        sequence=version,
        writer_epoch=1,
        step=version,
        manifest_sha256=b"m" * 32,
        model_root=ROOT,
        snapshot=None if snapshot is None else (part_ref(snapshot),),
        deltas=tuple(DeltaRef(base_version=base, parts=(part_ref(deltas[base]),)) for base in own),
        num_changed=0,
        num_elements=1,
        added=tuple(added_path(version, base=base, size_bytes=size) for base, size in merged.items()),
    )
