"""Checkpoints beside training: what the training thread staged is written by a thread of its own.

Invariant: at most one is in flight; it is written once the versions of all steps that it covers are announced (a
version that only a lost process had in memory could never be made again from a checkpoint of a later step), and its
step is called durable after it is. A failure reaches the training thread at its next call here, and ends the trainer.
The loop submits. With several ranks each has a worker, and writing is a collective of theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from astraflow.errors import UnavailableError
from astraflow_kit import failpoints
from astraflow_kit.log import get_logger
from astraflow_trainer.publish.publishing import PublishWorker

log = get_logger(__name__)

_POLL_S = 0.2
_END_S = 60.0
"""How long a trainer that failed waits for what its thread writes."""


class _UnwantedError(Exception):
    """Training failed while a checkpoint waited for its versions."""


class CheckpointWorker:
    """Writes staged checkpoints. Use as a context manager: after it no thread of it writes."""

    def __init__(self, publisher: PublishWorker, *, durable: Callable[[int, int], None]) -> None:
        """`durable` gets the step and the version of each checkpoint that is written, in the worker's thread."""
        self._publisher = publisher
        self._durable = durable
        self._unwanted = threading.Event()
        self._thread: threading.Thread | None = None
        self._written: Future[None] = Future()
        self._written.set_result(None)

    def submit(self, step: int, *, version: int, write: Callable[[], object]) -> None:
        """Let `write` make the checkpoint of `step` durable, and return at once; `wait` must have been called."""
        assert self._written.done(), "one checkpoint at a time"
        covered, written = self._publisher.num_submitted, Future[None]()

        def work() -> None:
            try:
                self._publisher.wait_until_done(covered, waiting=self._require_wanted)
                write()
                failpoints.hit("trainer.checkpoint_written")
                self._durable(step, version)
            except BaseException as error:  # noqa: BLE001 - handed to the training thread, which raises it
                written.set_exception(error)
            else:
                written.set_result(None)

        self._written = written
        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self, *, waiting: Callable[[], None]) -> None:
        """Return once nothing is in flight; `waiting` is called meanwhile. Raises what writing raised."""
        while self._thread is not None and not self._written.done():
            waiting()
            self._thread.join(_POLL_S)
        self._written.result()

    def raise_failure(self) -> None:
        """Raise what writing raised, if it did."""
        if self._written.done():
            self._written.result()

    def _require_wanted(self) -> None:
        if self._unwanted.is_set():
            raise _UnwantedError

    def __enter__(self) -> CheckpointWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self._unwanted.set()
        if self._thread is None:
            return
        self._thread.join(_END_S)
        if self._thread.is_alive():
            raise UnavailableError(
                f"a checkpoint is still being written after {_END_S:g} s; the trainer ends without waiting for it"
            )
