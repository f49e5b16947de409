"""Publishes one model after another: diff against the last published bytes, encode, upload, commit.

Invariant: a delta is only ever made against bytes that are in the log, because the publisher keeps its own
copy of the newest version and checks it by its root. The single-rank trainer calls `publish` beside its
next step; a sharded trainer uses `VersionWriter` directly, with parts from every rank.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from astraflow.errors import ConflictError
from astraflow_kit import failpoints
from astraflow_weights.codec import DeltaSummary, encode_delta, encode_snapshot, summarize_delta
from astraflow_weights.digest import TensorDigest, model_root
from astraflow_weights.manifest import DeltaRef
from astraflow_weights.tensor_hash import tensor_digests
from astraflow_weights.tensors import Array, Model, require_same_specs
from astraflow_weights.version_writer import CommittedVersion, VersionWriter


class Publisher:
    """Owns the bytes of the newest version. One owner per object: not thread-safe; every call blocks.

    writer = VersionWriter.open(store, run_id="r1", policy_id="solver", epoch=epoch)
    publisher = Publisher(writer, base=None, assets=[folder / "config.json"])
    publisher.publish(model, step=0)
    """

    def __init__(self, writer: VersionWriter, *, base: Model | None, assets: Sequence[Path] = ()) -> None:
        """`base` holds the newest version's bytes, None when the log has no version; `assets` go with every
        version.

        Raises ConflictError when `base` is not what the log's newest version holds: fetch that with a
        Mirror first.
        """
        self._writer = writer
        self._assets = tuple(assets)
        self._base: dict[str, Array] | None = None
        self._base_root: bytes | None = None
        if base is not None:
            self._keep(base, root=model_root(tensor_digests(base)))
        self._require_base()

    @property
    def newest(self) -> CommittedVersion | None:
        """The newest version in the log, as this publisher's writer last read it; None when there is none."""
        return self._writer.newest

    def publish(self, model: Model, *, step: int, learning_rate: float | None = None) -> CommittedVersion:
        """Commit the model as the version of `step`; it must not change during the call.

        Idempotent for one (step, bytes), also across restarts: then nothing is sent and the existing
        version is returned. Raises Fenced for good, Unavailable (call again), ModelMismatch for another
        architecture.
        """
        tensors = tensor_digests(model)
        root = model_root(tensors)
        committed = self._writer.find(step=step, root=root)
        if committed is None:
            self._require_base()
            committed = self._send(model, tensors, step=step, learning_rate=learning_rate)
        latest = self._writer.log.latest()
        if latest is not None and latest.version == committed.version:
            self._keep(model, root=root)
        return committed

    def _send(
        self, model: Model, tensors: tuple[TensorDigest, ...], *, step: int, learning_rate: float | None
    ) -> CommittedVersion:
        delta, summary = self._encode_delta(model)
        wants_snapshot = self._writer.wants_snapshot(delta_bytes=summary.size_bytes if summary else None)
        snapshot = encode_snapshot(model, version=self._next_version) if wants_snapshot else None
        delta_refs = self._writer.upload_parts(delta) if delta else ()
        snapshot_refs = self._writer.upload_parts(snapshot) if snapshot else None
        assets = self._writer.upload_assets(self._assets)
        failpoints.hit("weights.publish.parts_uploaded")
        deltas = (DeltaRef(base_version=self._next_version - 1, parts=delta_refs),) if delta_refs else ()
        return self._writer.commit(
            step=step,
            tensors=tensors,
            snapshot=snapshot_refs,
            deltas=deltas,
            assets=assets,
            num_changed=summary.num_changed if summary else 0,
            learning_rate=learning_rate,
        )

    @property
    def _next_version(self) -> int:
        return len(self._writer.log.records)

    def _encode_delta(self, model: Model) -> tuple[list[bytes] | None, DeltaSummary | None]:
        if self._base is None:
            return None, None
        version = self._next_version
        parts = encode_delta(self._base, model, base_version=version - 1, target_version=version)
        return parts, summarize_delta(parts)

    def _require_base(self) -> None:
        latest = self._writer.log.latest()
        newest = latest.model_root if latest else None
        if newest != self._base_root:
            raise ConflictError(
                f"the base of policy {self._writer.log.policy_id!r} is not the newest version in the log "
                f"({latest.version if latest else 'none'}); fetch that with a Mirror and open a new Publisher"
            )

    def _keep(self, model: Model, *, root: bytes) -> None:
        if self._base is None:
            self._base = {name: np.array(array, order="C") for name, array in model.items()}
        else:
            require_same_specs(self._base, model)
            for name, array in model.items():
                np.copyto(self._base[name], array)
        self._base_root = root
