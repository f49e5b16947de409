"""Publishes a model that several processes hold in shards: each diffs, encodes and uploads its own part.

Invariant: nothing is gathered; a version becomes visible only by the first process's manifest, after every
process has stored its parts; a delta is only ever made against bytes that are in the log, because each
process keeps its shards of the newest version, which are checked by their common root. Every call is a
collective and ends alike everywhere. One process is a group of one (`codec.peers.OnePeer`); `Compactor` adds cheaper
paths behind it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from astraflow.errors import ConflictError
from astraflow_kit import failpoints
from astraflow_weights.codec.delta import encode_delta_tiles
from astraflow_weights.codec.digest import TensorDigest, model_root
from astraflow_weights.codec.parts.writer import PartSetHead, Placed
from astraflow_weights.codec.peers import Peers
from astraflow_weights.codec.schema import Schema
from astraflow_weights.codec.shards import Cover, ShardedModel, check_cover, sharded_digests
from astraflow_weights.codec.snapshot import encode_snapshot_tiles
from astraflow_weights.codec.tensors import TensorSpec
from astraflow_weights.codec.tiles.grid import PartKind
from astraflow_weights.publish.agreement import Encoded, on_first_rank
from astraflow_weights.publish.kept import KeptVersion
from astraflow_weights.publish.shard_parts import ShardParts, announce_uploads, send_shard_parts
from astraflow_weights.publish.uploads import Uploads
from astraflow_weights.publish.version_writer import CommittedVersion, VersionWriter
from astraflow_weights.versions.log import VersionLog
from astraflow_weights.versions.manifest import DeltaRef
from astraflow_weights.versions.probe import Probe


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What the first process knows of the log before a version is sent."""

    existing: CommittedVersion | None
    """The version that these bytes have already for the step."""
    newest: int | None
    """The newest version that can be read; below `next_version` - 1 where an entry cannot."""
    newest_root: bytes | None
    next_version: int

    @property
    def base(self) -> int:
        """Version that the next delta starts from."""
        assert self.newest is not None
        return self.newest


class ShardPublisher:
    """Owns the shards of the newest version. One owner per object: not thread-safe; every call blocks.

    On every process of a trainer, in the same order:

        publisher = ShardPublisher(writer_or_none, uploads=uploads, peers=peers, base=None)
        publisher.publish(shards, step=0)
    """

    def __init__(
        self,
        writer: VersionWriter | None,
        *,
        uploads: Uploads,
        peers: Peers,
        base: ShardedModel | None,
        assets: Sequence[Path] = (),
        inline_snapshots: bool = True,
        context: bool = False,
        deltas: bool = True,
        base_lost: bool = False,
        encode_threads: int = 1,
    ) -> None:
        """A collective. `writer` belongs to the first process, None elsewhere; it also sends the assets.

        `base` holds this process's shards of the newest version, None when the log has no version. Raises
        ConflictError when that is not what the log's newest version holds: fetch that with a Mirror first.
        Without `inline_snapshots` only a version without a delta carries a snapshot in its manifest; a
        `Compactor` over `kept` makes the others. `context` allows RICE_CTX in deltas; without `deltas` there are none,
        and every version carries a snapshot. With `base_lost` nothing leads to the newest version any more: until it is
        published again, equal or under the next number, there is no base. `encode_threads` tiles are encoded at a time.
        """
        assert (writer is not None) == (peers.index == 0)
        self._writer = writer
        self._uploads = uploads
        self._peers = peers
        self._assets = tuple(assets)
        self._cover: Cover | None = None
        self._inline_snapshots = inline_snapshots
        self._context = context
        self._makes_deltas = deltas
        self._encode_threads = encode_threads
        self.base_lost = base_lost
        self.kept = KeptVersion()
        root = None if base is None else model_root(self._digests(base))
        plan = self._plan(step=-1, root=b"")
        self._require_root(root, plan)
        if base is not None and root is not None:
            self.kept.keep(base, version=plan.base, root=root)

    @property
    def newest(self) -> CommittedVersion | None:
        """The newest version in the log as last read; a collective. None when there is none."""
        return self._on_first_rank(lambda writer: writer.newest)

    def log_copy(self) -> VersionLog:
        """What was read of the log, for another owner; only on the first process, no collective."""
        return self._require_writer().log.copy()

    def committed_since(self, version: int | None) -> list[CommittedVersion]:
        """The versions in the log as last read after `version`, in order; all of them for None.

        Only on the first process, which announces them; no collective.
        """
        return self._require_writer().committed_since(version)

    def publish(
        self,
        model: ShardedModel,
        *,
        step: int,
        learning_rate: float | None = None,
        probe: Probe | None = None,
    ) -> CommittedVersion:
        """Commit the model as the version of `step`; a collective; the shards must not change during the call.

        `probe` is what the model answers; that of the first process is published.

        Idempotent for one (step, bytes), also across restarts and another number of processes: then nothing
        is sent and the existing version is returned. Raises Fenced for good, Unavailable (call again, on
        every process), ModelMismatch for another architecture.
        """
        tensors = self._digests(model)
        root = model_root(tensors)
        plan = self._plan(step=step, root=root)
        committed = plan.existing
        if committed is None:
            kept = self.kept.newest
            self._require_root(kept.root if kept else None, plan)
            with self._announced():
                committed = self._send(
                    model, tensors, plan=plan, step=step, learning_rate=learning_rate, probe=probe
                )
        if plan.newest is None or committed.version >= plan.newest:
            self.kept.keep(model, version=committed.version, root=root)
        return committed

    def _send(
        self,
        model: ShardedModel,
        tensors: tuple[TensorDigest, ...],
        *,
        plan: _Plan,
        step: int,
        learning_rate: float | None,
        probe: Probe | None,
    ) -> CommittedVersion:
        delta = self._send_delta(model, plan)
        snapshot = (
            self._send_snapshot(model, version=plan.next_version) if self._wants_snapshot(delta) else None
        )
        deltas = (DeltaRef(base_version=plan.base, parts=delta.refs),) if delta else ()

        def commit(writer: VersionWriter) -> CommittedVersion:
            assets = self._uploads.upload_assets(self._assets)
            failpoints.hit("weights.publish.parts_uploaded")
            return writer.commit(
                step=step,
                tensors=tensors,
                snapshot=snapshot.refs if snapshot else None,
                deltas=deltas,
                assets=assets,
                num_changed=delta.num_changed if delta else 0,
                learning_rate=learning_rate,
                probe=probe,
            )

        committed = self._on_first_rank(commit)
        assert committed is not None
        return committed

    @contextmanager
    def _announced(self) -> Iterator[None]:
        """Tell collectors of the uploads before the first part of any process, until they are named or given up."""
        try:
            announce_uploads(
                lambda: self._require_writer().announce_uploads(), uploads=self._uploads, peers=self._peers
            )
            yield
        finally:
            if self._writer is not None:
                self._writer.end_uploads()

    def _send_delta(self, model: ShardedModel, plan: _Plan) -> ShardParts | None:
        kept = self.kept.newest
        if kept is None or not self._makes_deltas:
            return None
        known = model.changes
        if known is not None and known.base_root != kept.root:
            # They lead here from something else than the newest version, as when a replay publishes again.
            model = replace(model, changes=None)
        head = PartSetHead(kind=PartKind.DELTA, base_version=plan.base, target_version=plan.next_version)
        tiles = partial(
            encode_delta_tiles, kept.shards, model, context=self._context, threads=self._encode_threads
        )
        return self._send_parts(tiles, head=head, specs=model.specs)

    def _send_snapshot(self, model: ShardedModel, *, version: int) -> ShardParts:
        head = PartSetHead(kind=PartKind.SNAPSHOT, base_version=version, target_version=version)
        tiles = partial(encode_snapshot_tiles, model, threads=self._encode_threads)
        return self._send_parts(tiles, head=head, specs=model.specs)

    def _send_parts(
        self, tiles: Callable[[], Iterable[Placed]], *, head: PartSetHead, specs: Sequence[TensorSpec]
    ) -> ShardParts:
        return send_shard_parts(
            tiles, head=head, schema=Schema.of(specs), uploads=self._uploads, peers=self._peers
        )

    def _wants_snapshot(self, delta: ShardParts | None) -> bool:
        if delta is not None and not self._inline_snapshots:
            return False
        size_bytes = None if delta is None else delta.size_bytes
        return on_first_rank(
            self._peers, lambda: self._require_writer().wants_snapshot(delta_bytes=size_bytes)
        )

    def _digests(self, model: ShardedModel) -> tuple[TensorDigest, ...]:
        if self._cover is None or self._cover.specs != model.specs:
            self._cover = check_cover(model, peers=self._peers)
        return sharded_digests(model, cover=self._cover, peers=self._peers)

    def _plan(self, *, step: int, root: bytes) -> _Plan:
        """Refresh the log on the first process; what all must know of it. Raises Fenced."""

        def plan() -> _Plan:
            writer = self._require_writer()
            existing = writer.find(step=step, root=root)
            newest = writer.log.latest()
            return _Plan(
                existing=existing,
                newest=newest.version if newest else None,
                newest_root=newest.model_root if newest else None,
                next_version=len(writer.log.records),
            )

        return on_first_rank(self._peers, plan, encode=asdict, decode=_decode_plan)

    def _require_root(self, root: bytes | None, plan: _Plan) -> None:
        """The root of what this publisher keeps must be that of the newest version, unless that cannot be had."""
        if plan.newest_root != root and not (root is None and self.base_lost):
            raise ConflictError(
                "the base of this publisher is not the newest version in the log "
                f"({'none' if plan.newest is None else plan.newest}); fetch that with a Mirror and "
                "open a new publisher"
            )

    def _require_writer(self) -> VersionWriter:
        assert self._writer is not None
        return self._writer

    def _on_first_rank(
        self, action: Callable[[VersionWriter], CommittedVersion | None]
    ) -> CommittedVersion | None:
        return on_first_rank(
            self._peers,
            lambda: action(self._require_writer()),
            encode=lambda committed: None if committed is None else asdict(committed),
            decode=_decode_committed,
        )


def _decode_plan(content: Encoded) -> _Plan:
    return _Plan(**content | {"existing": _decode_committed(content["existing"])})


def _decode_committed(content: Encoded) -> CommittedVersion | None:
    return None if content is None else CommittedVersion(**content)
