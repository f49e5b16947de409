"""Opens a policy's log for publishing under a claimed epoch, on all ranks together.

Invariant: older writers are fenced before anything is built on the log, and the base of the next delta is
what the log's newest version holds: the first rank fetches and verifies it, each rank takes only its own
rows from the files. The trainer's session calls it once per claim, and `compacting` around its training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from astraflow.client import Client
from astraflow_kit.log import get_logger
from astraflow_trainer.joined_run import JoinedRun
from astraflow_trainer.publish.published import HeldPart, same_shards
from astraflow_trainer.ranks.group import RankGroup
from astraflow_weights.codec.peers import Peers
from astraflow_weights.collection.collector import Collector
from astraflow_weights.collection.server_roots import server_roots
from astraflow_weights.errors import CorruptManifest, NoPath, VerificationFailed
from astraflow_weights.mirror.checkpoint import map_model
from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.publish.agreement import on_first_rank
from astraflow_weights.publish.compactor import Compactor
from astraflow_weights.publish.shard_publisher import ShardPublisher
from astraflow_weights.publish.sharded_snapshots import ShardedSnapshots
from astraflow_weights.publish.uploads import Uploads
from astraflow_weights.publish.version_writer import VersionWriter
from astraflow_weights.settings import CollectionSettings, PublishSettings
from astraflow_weights.store import ObjectStore
from astraflow_weights.store.layout import PolicyKeys
from astraflow_weights.versions.log import VersionLog

log = get_logger(__name__)

_LOST = "lost"


def open_publisher(
    store: ObjectStore,
    *,
    joined: JoinedRun,
    epoch: int,
    peers: Peers,
    held: HeldPart,
    mirror_dir: Path,
    assets: Sequence[Path],
    log: VersionLog,
) -> ShardPublisher:
    """Fence older writers and take the newest published bytes as the base of the next delta; a collective.

    `held` is the part of the model that this rank holds; `mirror_dir` is one folder that all ranks see; `log` is what
    the first rank has read already. Where parts of the newest version are gone and no path leads to it, or its entry
    cannot be read, there is no base: the trainer's own weights make up for it. Raises Fenced, and as `Mirror.advance`
    does otherwise.
    """
    settings = _settings(joined)
    writer: VersionWriter | None = None

    def open_log() -> str:
        """The folder of the newest version; empty when there is none."""
        nonlocal writer
        writer = VersionWriter.open(
            store,
            run_id=joined.run_id,
            policy_id=joined.policy_id,
            epoch=epoch,
            settings=settings,
            log=log.copy(),
        )
        return _fetch_newest(store, writer, mirror_dir=mirror_dir)

    newest = on_first_rank(peers, open_log)
    lost = newest == _LOST
    keys = PolicyKeys(joined.run_id, joined.policy_id)
    own = Uploads(store, keys=keys, threads=settings.upload_threads) if writer is None else writer.uploads
    return ShardPublisher(
        writer,
        uploads=own,
        peers=peers,
        base=same_shards(map_model(Path(newest)), like=held) if newest and not lost else None,
        base_lost=lost,
        assets=assets,
        inline_snapshots=False,
        context=joined.policy.trainer.publish.codec == "rice_ctx",
        deltas=joined.policy.trainer.publish.codec != "full",
        encode_threads=settings.encode_threads,
    )


@contextmanager
def compacting(
    store: ObjectStore,
    *,
    client: Client,
    joined: JoinedRun,
    epoch: int,
    publisher: ShardPublisher,
    group: RankGroup,
) -> Iterator[Callable[[], None]]:
    """Make merged deltas and snapshots and collect old parts beside training; yields what to call after each
    publication.

    The first rank does. With several ranks none holds a whole model, and they make snapshots together: there what is
    yielded is a collective of the publishing threads.
    """

    def compactor(want_snapshot: Callable[[], None] = lambda: None) -> Compactor:
        return Compactor(
            store,
            run_id=joined.run_id,
            policy_id=joined.policy_id,
            kept=publisher.kept if group.size == 1 else None,
            want_snapshot=want_snapshot,
            owes_snapshot=publisher.base_lost,
            settings=_settings(joined),
            collector=_collector(store, client=client, joined=joined, log=publisher.log_copy()),
            log=publisher.log_copy(),
        )

    if group.size == 1:
        with compactor() as alone:
            alone.notify()
            yield alone.notify
        return
    snapshots = ShardedSnapshots(
        store,
        run_id=joined.run_id,
        policy_id=joined.policy_id,
        epoch=epoch,
        kept=publisher.kept,
        peers=group.snapshots,
        threads=_settings(joined).upload_threads,
    )
    with snapshots, compactor(snapshots.want) if group.index == 0 else nullcontext() as first:
        if first is not None:
            first.notify()
        yield lambda: _after_publication(snapshots, group.publishing, compactor=first)


def _after_publication(snapshots: ShardedSnapshots, peers: Peers, *, compactor: Compactor | None) -> None:
    snapshots.begin(peers)
    if compactor is not None:
        compactor.notify()


def _collector(store: ObjectStore, *, client: Client, joined: JoinedRun, log: VersionLog) -> Collector | None:
    recipe = joined.policy.trainer.publish
    if recipe.keep_snapshots == 0:
        return None
    return Collector(
        store,
        run_id=joined.run_id,
        policy_id=joined.policy_id,
        roots=lambda: server_roots(client, run_id=joined.run_id, policy_id=joined.policy_id),
        settings=CollectionSettings(keep_snapshots=recipe.keep_snapshots, grace_s=recipe.collect_after_s),
        log=log,
    )


def _settings(joined: JoinedRun) -> PublishSettings:
    recipe = joined.policy.trainer.publish
    return PublishSettings(
        snapshot_every_versions=recipe.snapshot_every_versions, encode_threads=recipe.encode_threads
    )


def _fetch_newest(store: ObjectStore, writer: VersionWriter, *, mirror_dir: Path) -> str:
    if writer.log.latest() is None:
        return ""
    mirror = Mirror(mirror_dir)
    mirror.lend_manifest(writer.log)
    newest = writer.log.latest()
    assert newest is not None
    try:
        return str(mirror.advance(store, writer.log, target=newest.version).directory)
    except (VerificationFailed, NoPath, CorruptManifest) as error:
        log.error("weights.newest_version_lost", version=newest.version, message=error.message)
        return _LOST
