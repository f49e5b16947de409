"""The batch of the next step, bound, fetched and checked while the step in hand computes.

Invariant: at most one batch is read ahead, and its rows are used only where acquiring its step gives that very
batch; the thread that reads takes part in no collective. What fails here is raised when the step wants its rows. Owned
by `RankBatches`, whose training thread begins and takes; of several ranks the first one binds and shows the batch on
the board, and each fetches its own share.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from astraflow.dataflow.v1 import batch_pb2, batch_service_pb2
from astraflow.errors import AstraflowError
from astraflow_kit.log import get_logger
from astraflow_trainer.batches.source import BatchSource, Fetched, StepBatch
from astraflow_trainer.ranks.board import Board

log = get_logger(__name__)

_LOOK_S = 0.05
Share = Callable[[StepBatch], Sequence[batch_pb2.BatchItem] | None]
"""Which items of a batch this rank fetches; None for all."""


@dataclass
class _Reading:
    """One batch on its way. The thread writes `batch`, then `fetched` or `error`, then sets `done`."""

    step: int
    base_version: int
    over: threading.Event = field(default_factory=threading.Event)
    """Nobody wants it any more, or its step has begun."""
    done: threading.Event = field(default_factory=threading.Event)
    batch: StepBatch | None = None
    fetched: Fetched | None = None
    error: BaseException | None = None
    read_s: float = 0.0
    """How long fetching took."""
    thread: threading.Thread | None = None


class ReadAhead:
    """Reads one batch ahead in a thread. All methods are the training thread's.

    ahead.begin(8, base_version=4)      # beside step 7
    fetched = ahead.taken(batch_of_8)   # None: fetch it now
    """

    def __init__(
        self, source: BatchSource, *, lease_s: float, is_first: bool = True, board: Board | None = None
    ) -> None:
        """`board` is what several ranks share; `lease_s` that of a batch, which is renewed until its step begins."""
        self._source, self._lease_s = source, lease_s
        self._is_first, self._board = is_first, board
        self._reading: _Reading | None = None

    def begin(self, step: int, *, base_version: int, share: Share) -> None:
        """Read the batch of `step`, the one after the step in hand, which will start from `base_version`."""
        self.leave()
        reading = self._reading = _Reading(step, base_version)
        reading.thread = threading.Thread(
            target=self._read, args=(reading, share), name="read-ahead", daemon=True
        )
        reading.thread.start()

    def taken(self, batch: StepBatch) -> tuple[Fetched, float] | None:
        """The rows of a batch that was acquired for its step, and how long reading took; None where another one was
        read, or none yet. Waits for payloads that are on their way. Raises what reading ended with.
        """
        reading, self._reading = self._reading, None
        if reading is None:
            return None
        is_it = _same(reading.batch, batch)
        if is_it:
            reading.done.wait()
        reading.over.set()
        if reading.error is not None and (is_it or not isinstance(reading.error, AstraflowError)):
            raise reading.error
        return (reading.fetched, reading.read_s) if is_it and reading.fetched is not None else None

    def end(self) -> None:
        """No step follows: the first rank gives the batch back that was read, if one was."""
        if (reading := self.leave()) is None or reading.thread is None:
            return
        reading.thread.join()
        if self._is_first and reading.batch is not None:
            self._source.give_back(reading.batch)

    def leave(self) -> _Reading | None:
        """Forget the batch that is read; bound, it waits for whoever takes its step."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.over.set()
        return reading

    def _read(self, reading: _Reading, share: Share) -> None:
        try:
            with self._source.unit_of_work(reading.step):
                self._fetch(reading, share)
        except BaseException as error:  # noqa: BLE001 - `taken` raises it in the training thread
            reading.error = error
            if isinstance(error, AstraflowError):
                log.info(
                    "batch.not_read_ahead", step=reading.step, reason=error.reason, message=error.message
                )
        finally:
            reading.done.set()

    def _fetch(self, reading: _Reading, share: Share) -> None:
        batch = self._bound(reading) if self._is_first else self._shown(reading)
        if batch is None or reading.over.is_set():
            # Bound all the same, perhaps: the step finds it when it begins, or `end` gives it back.
            reading.batch = batch
            return
        if not self._is_first:
            self._take(reading, batch, share)
            return
        with self._source.kept_alive(batch, lease_s=self._lease_s):
            self._take(reading, batch, share)
            reading.over.wait()

    def _take(self, reading: _Reading, batch: StepBatch, share: Share) -> None:
        started = time.monotonic()
        reading.batch = batch
        reading.fetched = self._source.fetch(batch, items=share(batch))
        reading.read_s = time.monotonic() - started
        reading.done.set()

    def _bound(self, reading: _Reading) -> StepBatch | None:
        batch = self._source.read_ahead(
            reading.step, base_version=reading.base_version, stopped=reading.over.is_set
        )
        if batch is not None and self._board is not None:
            answer = batch_service_pb2.AcquireBatchResponse(batch=batch.bound, stage=batch.stage)
            self._board.show(reading.step, answer.SerializeToString())
        return batch

    def _shown(self, reading: _Reading) -> StepBatch | None:
        assert self._board is not None
        while (message := self._board.seen(reading.step)) is None:
            if reading.over.wait(_LOOK_S):
                return None
        return StepBatch.of(batch_service_pb2.AcquireBatchResponse.FromString(message))


def _same(read: StepBatch | None, batch: StepBatch) -> bool:
    """Whether these are one batch, for one version."""
    return read is not None and (read.bound.batch_id, read.bound.base_version) == (
        batch.bound.batch_id,
        batch.bound.base_version,
    )
