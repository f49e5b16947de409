"""Publishes the weights of an older version again, as the newest one.

Invariant: the new version has the old one's tensors, root and assets, and its delta leads there from the newest
version; whenever it dies, the log holds either no new version or the whole one, and going back again finds it. It
is a version of no step. `astraflow weights rollback` calls it, under an epoch of its own.
"""

from dataclasses import dataclass

from astraflow.errors import PreconditionError
from astraflow_kit import failpoints
from astraflow_weights.codec import (
    Schema,
    apply_delta,
    encode_delta,
    encode_snapshot,
    invert_delta,
    merge_deltas,
    summarize_delta,
)
from astraflow_weights.codec.tensor_hash import tensor_digests
from astraflow_weights.errors import CorruptPart, NoPath, VerificationFailed
from astraflow_weights.publish.chains import Chain, chained_delta
from astraflow_weights.publish.compactor import Compactor
from astraflow_weights.publish.version_writer import CommittedVersion, VersionWriter
from astraflow_weights.settings import PublishSettings
from astraflow_weights.store import ObjectStore
from astraflow_weights.versions.inspection import build_version
from astraflow_weights.versions.log import VersionLog
from astraflow_weights.versions.manifest import DeltaRef, Manifest, PartRef


@dataclass(frozen=True, kw_only=True)
class _PathBack:
    """Deltas to the new version: from the newest one, and from the old one, which changes nothing."""

    from_newest: list[bytes]
    from_old: list[bytes]
    num_changed: int


def roll_back(
    store: ObjectStore,
    writer: VersionWriter,
    *,
    version: int,
    settings: PublishSettings | None = None,
) -> CommittedVersion:
    """Commit the weights of `version` as the newest version; blocks.

    Idempotent: where the newest version has them already, that is returned (`existed`). Raises PreconditionError
    when nothing leads back any more, UnknownVersionError, Fenced for good, Unavailable (call again).
    """
    settings, log = settings or PublishSettings(), writer.log
    newest, old = log.latest(), log.record(version)
    assert newest is not None
    if newest.model_root == old.model_root:
        assert writer.newest is not None
        return writer.newest
    manifest = log.manifest(version)
    back = _path_back(store, log, version=version, threads=settings.upload_threads)
    with writer.uploading():
        committed = _commit(store, writer, back, manifest=manifest, threads=settings.upload_threads)
    # Who holds the old version, or finds its snapshot near, is there for next to nothing.
    paths = Compactor(
        store, run_id=log.run_id, policy_id=log.policy_id, kept=None, settings=settings, log=log.copy()
    )
    paths.offer_delta(version=committed.version, base_version=version, parts=back.from_old)
    return committed


def _commit(
    store: ObjectStore, writer: VersionWriter, back: _PathBack, *, manifest: Manifest, threads: int
) -> CommittedVersion:
    newest = writer.log.latest()
    assert newest is not None
    delta = writer.uploads.upload_parts(back.from_newest)
    snapshot = None
    if writer.wants_snapshot(delta_bytes=sum(part.size_bytes for part in delta)):
        snapshot = _snapshot(store, writer, back, manifest=manifest, threads=threads)
    failpoints.hit("weights.publish.parts_uploaded")
    return writer.commit(
        step=newest.step,
        tensors=manifest.tensors,
        snapshot=snapshot,
        deltas=(DeltaRef(base_version=newest.version, parts=delta),),
        assets=manifest.assets,
        num_changed=back.num_changed,
        rollback_of=manifest.version,
        probe=manifest.probe,
    )


def _path_back(store: ObjectStore, log: VersionLog, *, version: int, threads: int) -> _PathBack:
    newest = _newest(log)
    try:
        chain = chained_delta(store, log, base_version=version, version=newest, threads=threads)
    except (NoPath, CorruptPart) as broken:
        return _between_models(store, log, version=version, threads=threads, broken=broken)
    return _inverted(chain, target=len(log.records), schema=log.manifest(version).schema)


def _inverted(chain: Chain, *, target: int, schema: Schema) -> _PathBack:
    back = invert_delta(chain.parts, schema=schema, base=chain.base, target_version=target)
    # There and back again: proves the inverse without the model it leads to.
    circle = merge_deltas([chain.parts, back], schema=schema, base=chain.base)
    if changed := summarize_delta(circle).num_changed:
        raise VerificationFailed(
            f"the inverse of the deltas does not lead back, {changed} elements differ: report this defect",
            version=target,
        )
    return _PathBack(from_newest=back, from_old=circle, num_changed=summarize_delta(back).num_changed)


def _between_models(
    store: ObjectStore, log: VersionLog, *, version: int, threads: int, broken: Exception
) -> _PathBack:
    """The path back where no chain of deltas leads from the old version to the newest one any more."""
    newest, target = _newest(log), len(log.records)
    try:
        after = build_version(store, log, target=version, threads=threads)
        before = build_version(store, log, target=newest, threads=threads)
    except (NoPath, VerificationFailed) as error:
        raise PreconditionError(
            f"version {version} can no longer be built: {error.message} (deltas from it: {broken}); choose "
            "another one, and pin versions that you may want back (`astraflow weights pin`)"
        ) from error
    back = encode_delta(before, after, base_version=newest, target_version=target)
    same = encode_delta(after, after, base_version=version, target_version=target)
    return _PathBack(from_newest=back, from_old=same, num_changed=summarize_delta(back).num_changed)


def _snapshot(
    store: ObjectStore, writer: VersionWriter, back: _PathBack, *, manifest: Manifest, threads: int
) -> tuple[PartRef, ...]:
    """Parts of a snapshot of the new version, which is built and compared for it."""
    newest = _newest(writer.log)
    model = build_version(store, writer.log, target=newest, threads=threads)
    apply_delta(model, back.from_newest)
    if tensor_digests(model) != manifest.tensors:
        raise VerificationFailed(
            f"going back from version {newest} does not give version {manifest.version}: report this defect",
            version=manifest.version,
        )
    return writer.uploads.upload_parts(encode_snapshot(model, version=len(writer.log.records)))


def _newest(log: VersionLog) -> int:
    newest = log.latest()
    assert newest is not None
    return newest.version
