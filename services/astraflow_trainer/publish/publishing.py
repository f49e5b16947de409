"""Publishing beside training: one thread that encodes, uploads, commits and announces versions in order.

Invariant: versions are published in the order of their steps, each is committed in the store before it is
announced, none is announced before those below it (a Redis that lost its last second hears of them again),
and training is at most `max_behind` versions ahead of the newest announced one. A failure that
retrying cannot mend ends the trainer at its next call here. The loop submits; `PublishWorker` owns the
thread. With several ranks each has a worker, and publishing is a collective of theirs; the first rank
announces.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import stamina

from astraflow.errors import RetryableError
from astraflow_kit import failpoints, traces
from astraflow_kit.log import get_logger
from astraflow_kit.unit_of_work import step_correlation, unit_of_work
from astraflow_weights.codec.shards import ShardedModel
from astraflow_weights.errors import Unavailable
from astraflow_weights.publish.announcing import Announcer, Committed
from astraflow_weights.publish.version_writer import CommittedVersion
from astraflow_weights.versions.probe import Probe

log = get_logger(__name__)

PUBLISH = "publish"
"""What training waits for while versions are made and uploaded, as a slug."""
STORE_RETRY_S = 600.0
"""How long a store that fails, or is not there, is waited for."""
_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelBytes:
    """What the training thread copied of this rank's weights; the publishing thread does the rest."""

    open: Callable[[], ShardedModel]
    """The shards by Hugging Face tensor name, as bfloat16 bit patterns that do not change until `published`.
    Called once, in the order of the steps.
    """
    published: Callable[[bytes], None] = lambda _: None
    """Tell the model root of the version that they are now; the copy is no longer needed."""
    probe: Probe | None = None
    """What the policy answers with these weights."""


class VersionPublisher(Committed, Protocol):
    """Commits a model as the version of a step; `astraflow_weights.publish.shard_publisher.ShardPublisher`
    is the implementation.
    """

    def publish(
        self,
        model: ShardedModel,
        *,
        step: int,
        learning_rate: float | None = None,
        probe: Probe | None = None,
    ) -> CommittedVersion:
        """Commit; idempotent for one (step, bytes). Raises a RetryableError to be called again."""


class PublishWorker:
    """Publishes submitted models in a thread of its own. Use as a context manager; leaving waits for what is
    queued.
    """

    def __init__(
        self,
        publisher: VersionPublisher,
        announcer: Announcer | None,
        *,
        policy_id: str,
        max_behind: int,
        published: Callable[[CommittedVersion], None],
        failing: Callable[[str, str], None] = lambda _reason, _detail: None,
    ) -> None:
        """`failing` gets what the store lacks, as slug and text, and ("", "") when it lacks nothing any more."""
        self._publisher = publisher
        self._announcer = announcer
        self._policy_id = policy_id
        self._max_behind = max_behind
        self._published = published
        self._failing = failing
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._idle = threading.Condition()
        self.num_submitted = 0
        """Jobs so far: models, and announcements."""
        self._num_done = 0
        self._failure: BaseException | None = None
        self.waits_for = PUBLISH
        """What versions wait for, as a slug: their own making, or what the store lacks."""
        self._thread = threading.Thread(target=self._work, name="publish", daemon=True)

    def submit(self, step: int, model: ModelBytes, *, learning_rate: float | None = None) -> None:
        """Queue the model of `step` and return at once."""
        self._raise_failure()
        with self._idle:
            self.num_submitted += 1
        step_place = traces.here()

        def publish() -> None:
            with traces.span("publish", {"astraflow.step": step}, under=step_place) as recorded:
                version = self._publish(step, model, learning_rate=learning_rate)
                recorded.set_attributes({"astraflow.policy": self._policy_id, "astraflow.version": version})

        self._jobs.put(publish)

    def announce_again(self) -> None:
        """Let the server hear of versions that it forgot, unless a publication is about to tell it anyway."""
        self._raise_failure()
        with self._idle:
            if self._num_done < self.num_submitted:
                return
            self.num_submitted += 1
        self._jobs.put(self._announce)

    def wait_for_room(self, *, waiting: Callable[[], None]) -> None:
        """Return once at most `max_behind` versions are unpublished; `waiting` is called if that takes
        time.
        """
        self._wait_until(lambda: self.num_submitted - self._num_done <= self._max_behind, waiting=waiting)

    def wait_until_done(
        self, num_jobs: int | None = None, *, waiting: Callable[[], None] = lambda: None
    ) -> None:
        """Return once the first `num_jobs` that were submitted, None for all, are announced; `waiting` is called
        meanwhile. Raises the worker's failure.
        """
        wanted = self.num_submitted if num_jobs is None else num_jobs
        self._wait_until(lambda: self._num_done >= wanted, waiting=waiting)

    def _wait_until(self, satisfied: Callable[[], bool], *, waiting: Callable[[], None]) -> None:
        with self._idle:
            while not satisfied():
                self._raise_failure()
                waiting()
                self._idle.wait(_POLL_S)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - handed to the training thread, which raises it
                self._failure = error
                with self._idle:
                    self._idle.notify_all()
                return
            with self._idle:
                self._num_done += 1
                self._idle.notify_all()

    def _publish(self, step: int, model: ModelBytes, *, learning_rate: float | None) -> int:
        """Return the number of the version."""
        with unit_of_work(step_correlation(self._policy_id, step), step=step):
            failpoints.hit("trainer.before_publish")
            shards = model.open()
            for attempt in stamina.retry_context(on=RetryableError, attempts=None, timeout=STORE_RETRY_S):
                with attempt, self._store_may_fail():
                    committed = self._publisher.publish(
                        shards, step=step, learning_rate=learning_rate, probe=model.probe
                    )
            model.published(committed.model_root)
            failpoints.hit("trainer.committed")
            self._announce()
            failpoints.hit("trainer.announced")
            self._published(committed)
            _log_published(committed)
            return committed.version

    @contextmanager
    def _store_may_fail(self) -> Iterator[None]:
        try:
            yield
        except Unavailable as error:
            self.waits_for = error.wait
            self._failing(error.wait, error.message)
            log.warning("version.not_published", waiting_for=self.waits_for, message=error.message)
            raise
        self.waits_for = PUBLISH
        self._failing("", "")

    def _announce(self) -> None:
        if self._announcer is None:
            return
        self._announcer.announce_missing(self._publisher)

    def __enter__(self) -> PublishWorker:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._jobs.put(None)
        if kind is None:
            self._thread.join()
            self._raise_failure()


def _log_published(committed: CommittedVersion) -> None:
    log.info(
        "version.published",
        version=committed.version,
        delta_bytes=committed.delta_bytes,
        snapshot_bytes=committed.snapshot_bytes,
        density=round(committed.density, 5),
    )
