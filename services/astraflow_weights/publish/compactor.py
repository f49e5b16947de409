"""Makes merged deltas, snapshots and checkpoints of the log behind the publisher, in one thread of its own.

Invariant: nothing waits for it, and nothing depends on it: a version is whole by its manifest, what is made
here are cheaper paths to it. Parts are stored before the path that names them is created, once; whoever comes
second finds it. Killed at any instant it leaves parts that nothing names, which the collector that works in the
same thread deletes in the end. The trainer's first rank owns one.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial

from astraflow_kit.clock import Clock, SystemClock
from astraflow_kit.log import get_logger
from astraflow_weights.codec.parts.writer import PartSetHead, write_parts
from astraflow_weights.codec.schema import Schema
from astraflow_weights.codec.snapshot import encode_snapshot_tiles
from astraflow_weights.codec.tiles.grid import PartKind
from astraflow_weights.collection.collector import Collector
from astraflow_weights.publish.chains import chained_delta
from astraflow_weights.publish.compaction import Span, due_merges, snapshot_due
from astraflow_weights.publish.kept import KeptVersion
from astraflow_weights.publish.log_keeping import keep_log
from astraflow_weights.publish.uploads import Uploads, offer_path
from astraflow_weights.settings import PublishSettings
from astraflow_weights.store import ObjectStore
from astraflow_weights.store.layout import PolicyKeys
from astraflow_weights.versions.intents import UploadIntents
from astraflow_weights.versions.log import VersionLog
from astraflow_weights.versions.manifest import AddedPath, PartRef

log = get_logger(__name__)

# After a step of the collector that failed, and at least between two.
_COLLECT_AGAIN_S = 60.0
_COLLECT_PAUSE_S = 1.0


class Compactor:
    """Works whenever it is notified. Use as a context manager; leaving waits for the piece of work in hand.

    with Compactor(store, run_id="r1", policy_id="solver", kept=publisher.kept) as compactor:
        publisher.publish(model, step=1)
        compactor.notify()
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        run_id: str,
        policy_id: str,
        kept: KeptVersion | None,
        want_snapshot: Callable[[], None] = lambda: None,
        settings: PublishSettings | None = None,
        clock: Clock | None = None,
        collector: Collector | None = None,
        log: VersionLog | None = None,
        owes_snapshot: bool = False,
    ) -> None:
        """`kept` holds the whole model of the newest version, for snapshots; where it is None, `want_snapshot` is
        called when one is due. `collector` is given its steps in the thread, too. What `log` has read is not read
        again; it is the compactor's from now on. With `owes_snapshot` the next version that is kept gets one, due or
        not: parts of versions before it are gone.
        """
        self._store = store
        self._settings = settings or PublishSettings()
        self._clock = clock or SystemClock()
        self._kept = kept
        self._want_snapshot = want_snapshot
        self._owes_snapshot = owes_snapshot
        keys = PolicyKeys(run_id, policy_id)
        self._log = log or VersionLog(store, run_id=run_id, policy_id=policy_id)
        self._uploads = Uploads(store, keys=keys, threads=self._settings.upload_threads)
        self._intents = UploadIntents(store, keys=keys, clock=self._clock)
        self._collector = collector
        self._collect_at_s = self._clock.monotonic_s()
        self._occasion = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="weights-compactor", daemon=True)

    def notify(self) -> None:
        """Say that there may be work; returns at once. Any thread."""
        self._occasion.set()

    def offer_delta(self, *, version: int, base_version: int, parts: Sequence[bytes]) -> None:
        """Offer a delta that somebody else made, in the calling thread. Raises as the store does."""
        self._log.refresh()
        self._announce(version, base_version, parts)

    def compact(self) -> bool:
        """Make everything that is due, in the calling thread. False when something failed: call again."""
        if not self._attempt("refresh", self._log.refresh):
            return False
        done = [self._attempt("checkpoint", self._keep_log)]
        done += [
            self._attempt("merge", partial(self._merge, span)) for span in list(due_merges(self._log.records))
        ]
        if self._owes_snapshot or snapshot_due(self._log.records, self._settings):
            make = self._want_snapshot if self._kept is None else self._snapshot
            done.append(self._attempt("snapshot", make))
        return all(done)

    def _work(self) -> None:
        while True:
            notified = self._occasion.wait(self._collector_wait_s())
            self._occasion.clear()
            if self._stopping.is_set():
                return
            if notified:
                self.compact()
            self._collect()

    def _collector_wait_s(self) -> float | None:
        if self._collector is None:
            return None
        return max(0.0, self._collect_at_s - self._clock.monotonic_s())

    def _collect(self) -> None:
        """One step of the collector, when it is due."""
        if self._collector is None or self._clock.monotonic_s() < self._collect_at_s:
            return
        self._collect_at_s = self._clock.monotonic_s() + _COLLECT_AGAIN_S
        self._attempt("collect", partial(self._collect_step, self._collector))

    def _collect_step(self, collector: Collector) -> None:
        step = collector.step(stopping=self._stopping.is_set)
        self._collect_at_s = self._clock.monotonic_s() + max(step.wait_s, _COLLECT_PAUSE_S)

    def _attempt(self, kind: str, action: Callable[[], object]) -> bool:
        """Whether `action` succeeded; what fails is logged and made at the next occasion."""
        if self._stopping.is_set():
            return False
        try:
            action()
        except Exception as error:  # noqa: BLE001 - the versions are whole without it; the next occasion retries
            log.warning("compaction.failed", kind=kind, error=type(error).__name__, message=str(error))
            return False
        return True

    def _keep_log(self) -> None:
        keep_log(self._store, self._log, every_entries=self._settings.checkpoint_every_entries)

    def _merge(self, span: Span) -> None:
        chain = chained_delta(
            self._store,
            self._log,
            base_version=span.base_version,
            version=span.version,
            threads=self._settings.upload_threads,
        )
        self._announce(span.version, span.base_version, chain.parts)

    def _snapshot(self) -> None:
        """A snapshot of what is kept now, which may be newer than what made it due."""
        assert self._kept is not None
        with self._kept.lend() as kept:
            if kept is None:
                return
            # What is kept was committed before.
            self._log.refresh_entries()
            record = self._log.record(kept.version)
            offered = record.offered_snapshot is not None
            if (offered and not self._owes_snapshot) or record.model_root != kept.root:
                return
            head = PartSetHead(kind=PartKind.SNAPSHOT, base_version=kept.version, target_version=kept.version)
            tiles = encode_snapshot_tiles(kept.shards)
            parts = list(write_parts(tiles, head=head, schema=Schema.of(kept.shards.specs)))
        # One that is offered has the same parts under the same names: what is missing of them is there again.
        self._announce(kept.version, None, parts)
        self._owes_snapshot = False

    def _announce(self, version: int, base_version: int | None, parts: Sequence[bytes]) -> None:
        assert self._log.owner is not None
        self._intents.open(epoch=self._log.owner.epoch)
        try:
            self._uploads.read_tombstones()
            self._offer(version, base_version, self._uploads.upload_parts(parts))
        finally:
            self._intents.close()

    def _offer(self, version: int, base_version: int | None, refs: tuple[PartRef, ...]) -> None:
        path = AddedPath(
            run_id=self._log.run_id,
            policy_id=self._log.policy_id,
            version=version,
            base_version=base_version,
            model_root=self._log.record(version).model_root,
            parts=refs,
            created_time_s=self._clock.wall_time_s(),
        )
        offer_path(self._store, path)
        self._log.refresh()

    def __enter__(self) -> "Compactor":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stopping.set()
        self._occasion.set()
        if kind is None:
            self._thread.join()
