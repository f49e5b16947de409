"""Writes a trainer's log-probs of each step, in a thread of its own.

Invariant: training never waits for it and never ends by it. A store that fails is said once, until it takes a step
again; the steps between have no log-probs. Made by the trainer's session on each rank.
"""

import queue
import threading
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from astraflow.dataflow.v1 import batch_pb2
from astraflow.recipe.dataflow import ArchiveSettings
from astraflow_archive import trainer_logprobs
from astraflow_kit.log import get_logger
from astraflow_weights.store import ObjectStore

log = get_logger(__name__)

MOST_WAITING = 64
"""Steps that wait for a slow store; later ones are missed."""
CLOSE_S = 20.0
"""How long the end of a trainer waits for those."""


class LogprobWriter:
    """One rank's queue and thread. Use as a context manager."""

    def __init__(self, store: ObjectStore, run_id: str, *, settings: ArchiveSettings) -> None:
        self._store, self._run_id, self._settings = store, run_id, settings
        self._waiting: queue.SimpleQueue[tuple[batch_pb2.Batch, Mapping[str, NDArray[np.float32]]] | None] = (
            queue.SimpleQueue()
        )
        self._fails = False
        # It may hang in a call; the process then ends without it.
        self._thread = threading.Thread(target=self._run, name="trainer-logprobs", daemon=True)

    def __enter__(self) -> "LogprobWriter":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("trainer_logprobs.not_written", steps=self._waiting.qsize(), waited_s=CLOSE_S)

    def put(self, batch: batch_pb2.Batch, logprobs: Mapping[str, NDArray[np.float32]]) -> None:
        """Queue what this rank made of its rows of a batch: float32[T] by trajectory. Returns at once."""
        if self._waiting.qsize() >= MOST_WAITING:
            self._missed(batch.step, f"the store is {MOST_WAITING} steps behind")
            return
        self._waiting.put((batch, logprobs))

    def _run(self) -> None:
        while (step := self._waiting.get()) is not None:
            self._write(*step)

    def _write(self, batch: batch_pb2.Batch, logprobs: Mapping[str, NDArray[np.float32]]) -> None:
        held = {item.trajectory_id for item in batch.items if self._settings.has_task(item.task_id)}
        wanted = {name: values for name, values in logprobs.items() if name in held}
        if not wanted:
            return
        try:
            trainer_logprobs.write(
                self._store, self._run_id, policy_id=batch.policy_id, step=batch.step, logprobs=wanted
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self._missed(batch.step, f"{type(error).__name__}: {error}")
            return
        self._fails = False

    def _missed(self, step: int, error: str) -> None:
        if not self._fails:
            self._fails = True
            log.warning("trainer_logprobs.failed", step=step, message=error)
