"""Snapshots of a model that several processes hold, made behind their publishers.

Invariant: one at a time, of a version that is in the log: every process encodes and stores its own shards of the
copy that its publisher keeps, in a thread and over connections of its own, and the first process offers the whole once
all have stored theirs. Publishing waits for none of it; what fails in the store is made again later, what fails
among the processes ends the next call. Each process of a trainer owns one; the first one's compactor asks for
snapshots.
"""

import queue
import threading
from collections.abc import Iterator
from contextlib import ExitStack

from astraflow.errors import AstraflowError
from astraflow_kit.clock import Clock, SystemClock
from astraflow_kit.log import get_logger
from astraflow_weights.codec.parts.writer import PartSetHead, Placed
from astraflow_weights.codec.peers import Peers
from astraflow_weights.codec.schema import Schema
from astraflow_weights.codec.snapshot import encode_snapshot_tiles
from astraflow_weights.codec.tiles.grid import PartKind
from astraflow_weights.publish.agreement import on_first_rank
from astraflow_weights.publish.kept import Kept, KeptVersion
from astraflow_weights.publish.shard_parts import announce_uploads, send_shard_parts
from astraflow_weights.publish.uploads import Uploads, offer_path
from astraflow_weights.store import ObjectStore
from astraflow_weights.store.layout import PolicyKeys
from astraflow_weights.versions.intents import UploadIntents
from astraflow_weights.versions.manifest import AddedPath, PartRef

log = get_logger(__name__)


class ShardedSnapshots:
    """One process's part. Use as a context manager on all of them; leaving waits for the snapshot in hand.

    with ShardedSnapshots(store, run_id="r1", policy_id="solver", epoch=7, kept=publisher.kept, peers=others) as s:
        s.want()                                  # on the first process, any thread
        publisher.publish(shards, step=1)
        s.begin(peers)                            # on all, the publishing thread
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        run_id: str,
        policy_id: str,
        epoch: int,
        kept: KeptVersion,
        peers: Peers,
        threads: int = 4,
        clock: Clock | None = None,
    ) -> None:
        """`peers` are the same processes over connections that nothing else uses; `epoch` is the writer's."""
        self._store = store
        self._ids = run_id, policy_id
        self._epoch = epoch
        self._kept = kept
        self._peers = peers
        self._clock = clock or SystemClock()
        keys = PolicyKeys(run_id, policy_id)
        self._uploads = Uploads(store, keys=keys, threads=threads)
        self._intents = UploadIntents(store, keys=keys, clock=self._clock)
        self._wanted = threading.Event()
        self.idle = threading.Event()
        """Set while no snapshot is being made here."""
        self.idle.set()
        self._jobs: queue.Queue[tuple[Kept, ExitStack] | None] = queue.Queue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="weights-snapshots", daemon=True)

    def want(self) -> None:
        """Ask for a snapshot of the version that is published next, or now. First process, any thread."""
        self._wanted.set()

    @property
    def alive(self) -> bool:
        """Whether snapshots can still be made."""
        return self._failure is None

    def begin(self, publishing: Peers) -> None:
        """Start the snapshot of the newest version if one is wanted and none is being made; a collective.

        Returns at once; the publisher goes on in a second copy of its shards meanwhile. Raises what broke the
        exchange with the other processes.
        """
        if self._failure is not None:
            raise self._failure
        if not on_first_rank(publishing, lambda: self._wanted.is_set() and self.idle.is_set()):
            return
        self._wanted.clear()
        self.idle.clear()
        with ExitStack() as lending:
            kept = lending.enter_context(self._kept.lend())
            assert kept is not None
            self._jobs.put((kept, lending.pop_all()))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            kept, lending = job
            try:
                self._make(kept, lending)
            except (AstraflowError, OSError) as error:
                # All processes know of it; the version is whole without, and the compactor asks again.
                log.warning(
                    "compaction.failed", kind="snapshot", error=type(error).__name__, message=str(error)
                )
            except BaseException as error:  # noqa: BLE001 - handed to the publishing thread, which raises it
                self._failure = error
                return
            self.idle.set()

    def _make(self, kept: Kept, lending: ExitStack) -> None:
        def tiles() -> Iterator[Placed]:
            # The copy is given back before anybody hears that this process is done with it.
            with lending:
                yield from encode_snapshot_tiles(kept.shards)

        head = PartSetHead(kind=PartKind.SNAPSHOT, base_version=kept.version, target_version=kept.version)
        schema = Schema.of(kept.shards.specs)
        try:
            announce_uploads(
                lambda: self._intents.open(epoch=self._epoch), uploads=self._uploads, peers=self._peers
            )
            made = send_shard_parts(tiles, head=head, schema=schema, uploads=self._uploads, peers=self._peers)
            on_first_rank(self._peers, lambda: self._offer(kept, made.refs))
        finally:
            lending.close()
            self._intents.close()

    def _offer(self, kept: Kept, refs: tuple[PartRef, ...]) -> None:
        run_id, policy_id = self._ids
        path = AddedPath(
            run_id=run_id,
            policy_id=policy_id,
            version=kept.version,
            base_version=None,
            model_root=kept.root,
            parts=refs,
            created_time_s=self._clock.wall_time_s(),
        )
        offer_path(self._store, path)

    def __enter__(self) -> "ShardedSnapshots":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._jobs.put(None)
        if kind is None:
            self._thread.join()
            if self._failure is not None:
                raise self._failure
