"""The weight source of a running node: the run's store and this node's mirror of one policy.

Invariant: only the entry that the server announced is activated: its sha256 in the log must be the announced
one, so neither a stale listing nor a tampered store can slip in another version. Blocking; `weight_sync`
calls it in a thread, one call at a time. A policy that is a snapshot of another mirrors that one's versions, under the
numbers of its own announcements.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from astraflow.dataflow.v1 import version_pb2
from astraflow_kit.log import get_logger
from astraflow_weights.errors import CorruptManifest, VerificationFailed
from astraflow_weights.mirror.changes import ChangedElements
from astraflow_weights.mirror.lock import Hold
from astraflow_weights.mirror.mirror import AdvanceResult, Mirror
from astraflow_weights.store import ObjectStore
from astraflow_weights.versions.log import VersionLog
from astraflow_weights.versions.probe import Probe
from astraflow_weights.versions.pull import PullCounts

log = get_logger(__name__)


class MirrorSource:
    """Verified versions in a `Mirror`. Not thread-safe: one owner, one call at a time.

    Without a `mirror` of an earlier life, `open_mirror` makes one when the size of the model is known.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        log_reader: VersionLog,
        mirror: Mirror | None,
        open_mirror: Callable[[int], Mirror],
    ) -> None:
        self._store = store
        self._log = log_reader
        self._mirror = mirror
        self._open_mirror = open_mirror
        self._fetched: AdvanceResult | None = None
        self._announced_as: dict[int, int] = {}
        """Of a snapshot policy: versions in the store, and as what they were announced last."""

    @property
    def version(self) -> int | None:
        """Version the mirror holds whole, None before the first; it may be one of an earlier life of this node."""
        held = self._mirror.version if self._mirror else None
        return None if held is None else self._announced_as.get(held, held)

    @property
    def counts(self) -> PullCounts:
        """What was fetched since the process started."""
        return self._mirror.counts if self._mirror else PullCounts()

    @property
    def damage(self) -> VerificationFailed | None:
        """What is known to be wrong with the mirror and could not be repaired yet."""
        return self._mirror.damage if self._mirror else None

    def probe(self, version: int) -> Probe | None:
        """What a model with the weights of a version answers; None when it does not say, or was not fetched last."""
        fetched = self._fetched_as(version)
        return fetched.probe if fetched else None

    def changes(self, version: int) -> ChangedElements | None:
        """What the last fetch changed to bring this version, where the mirror records it."""
        fetched = self._fetched_as(version)
        return fetched.changes if fetched else None

    def _fetched_as(self, version: int) -> AdvanceResult | None:
        """The last fetch, if it brought this version."""
        fetched = self._fetched  # another thread may fetch the next one meanwhile
        return fetched if fetched is not None and fetched.version == version else None

    def try_hold(self) -> Hold | None:
        """Keep the version as it is while an engine loads. Any thread."""
        held = self._mirror.try_hold() if self._mirror else None
        return held and replace(held, version=self._announced_as.get(held.version, held.version))

    def prefetch(self, announced: version_pb2.Version) -> None:
        """Bring what the announced version is made of to this machine, and leave the mirror as it is.

        Raises as `fetch` does.
        """
        self._find(announced).prefetch(self._store, self._log, target=_stored(announced))

    def fetch(self, announced: version_pb2.Version) -> Path:
        """Bring the mirror to the announced version, verified tensor by tensor; returns its folder.

        Raises UnknownVersionError (retry) when the log does not list it yet, CorruptManifest when its entry
        is not the announced one, and what `Mirror.advance` raises.
        """
        result = self._find(announced).advance(self._store, self._log, target=_stored(announced))
        if announced.snapshot_of:
            self._announced_as[result.version] = announced.version
        # Numbers of a snapshot policy are the server's: what changed between those in the store says nothing of them.
        changes = None if announced.snapshot_of else result.changes
        self._fetched = replace(result, version=announced.version, changes=changes)
        _report(result)
        return result.directory

    def _find(self, announced: version_pb2.Version) -> Mirror:
        """Read the log and compare its entry with the announced one; returns the mirror that is to hold it."""
        self._log.refresh()
        if self._mirror is not None:
            self._mirror.lend_manifest(self._log)
        record = self._log.record(_stored(announced))
        if announced.manifest_sha256 and record.manifest_sha256 != announced.manifest_sha256:
            raise CorruptManifest(
                f"version {announced.version} of policy {announced.policy_id!r}: entry {record.sequence} in "
                f"the store has sha256 {record.manifest_sha256.hex()[:16]}…, the server announced "
                f"{announced.manifest_sha256.hex()[:16]}…; store and server belong to different histories"
            )
        if self._mirror is None:
            self._mirror = self._open_mirror(self._log.manifest(_stored(announced)).size_bytes)
        return self._mirror


def _stored(announced: version_pb2.Version) -> int:
    """The number in the store of what was announced."""
    return announced.snapshot_version if announced.snapshot_of else announced.version


def _report(result: AdvanceResult) -> None:
    for edge in result.rejected:
        log.error("weights.path_rejected", version=edge.version, base_version=edge.base_version)
    counts = result.counts
    log.info(
        "weights.mirrored",
        base_version=result.base_version,
        snapshot_bytes=counts.snapshot_bytes,
        delta_bytes=counts.delta_bytes,
        repaired_tiles=counts.repaired_tiles,
        repair_bytes=counts.repair_bytes,
    )
