"""How much of its time a training thread waits for batches, with and without reading the next one beside a step.

Invariant: it is the trainer's own loop, ranks' batches and reading thread; only the server's answers are left out, and
the payloads of a batch come over a link that takes half of a step's time, and nothing of the CPU. Called by
`experiment`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from astraflow.dataflow.v1 import batch_pb2, batch_service_pb2
from astraflow_bench.figures import Figure
from astraflow_bench.trainer.blocking import run_loop
from astraflow_bench.trainer.sizes import TrainerSizes
from astraflow_bench.trainer.workload import geometric_lengths, rows_of
from astraflow_trainer.batches.rank_batches import RankBatches
from astraflow_trainer.batches.read_ahead import ReadAhead
from astraflow_trainer.batches.rows import TrainingRow
from astraflow_trainer.batches.source import BatchSource, Fetched, StepBatch
from astraflow_trainer.progress import Progress, StepRecord
from astraflow_trainer.ranks.reductions import OneRank

_LINK = 0.5
"""Time on the link, of a step's."""
_LEASE_S = 60.0


class _FarRows:
    """A `BatchSource` that always has a batch, whose payloads take `link_s` to come."""

    num_quarantined = 0
    failed = None

    def __init__(self, rows: Sequence[TrainingRow], *, link_s: float) -> None:
        self._rows, self._link_s = rows, link_s

    def unit_of_work(self, _step: int) -> AbstractContextManager[None]:
        return nullcontext()

    def acquire(self, step: int, *, base_version: int, **_: Any) -> StepBatch:
        bound = batch_pb2.Batch(batch_id=f"batch-{step}", step=step, base_version=base_version)
        return StepBatch(bound, batch_service_pb2.BATCH_STAGE_UNSPECIFIED)

    def read_ahead(self, step: int, *, base_version: int, stopped: Callable[[], bool]) -> StepBatch:
        del stopped
        return self.acquire(step, base_version=base_version)

    def kept_alive(self, _batch: StepBatch, *, lease_s: float) -> AbstractContextManager[None]:
        del lease_s
        return nullcontext()

    def record_intent(self, _batch: StepBatch) -> None:
        """Nobody asks."""

    def fetch(self, _batch: StepBatch, *, items: object = None) -> Fetched:
        del items
        time.sleep(self._link_s)
        return Fetched(list(self._rows), num_bytes=0, num_stale_tokens=0, problems={})

    def finish(self, _batch: StepBatch, *, skipped: bool, **_: Any) -> bool:
        return skipped

    def mark_durable(self, _step: int) -> None:
        """Nobody asks."""

    def give_back(self, _batch: StepBatch) -> None:
        """Nobody asks."""


def measure_prefetch(sizes: TrainerSizes, folder: Path) -> list[Figure]:
    """The share of waiting in steps that follow another one, by the clock, without and with prefetching."""
    rows = rows_of(geometric_lengths(sizes.rows, median=sizes.median))
    step_s = fmean(record.train_s for record in _records(sizes, folder / "alone", rows, link_s=0.0))
    link_s = _LINK * step_s
    waits = {
        subject: _waiting(_records(sizes, folder / subject, rows, link_s=link_s, prefetches=subject == "on"))
        for subject in ("off", "on")
    }
    figure = partial(Figure, what="training thread waits for a batch", unit="% of the time")
    return [
        Figure(
            what="a batch on its way", subject="half of a step's time, by the clock", value=link_s, unit="s"
        ),
        *(figure(subject=f"prefetch {subject}", value=100 * share) for subject, share in waits.items()),
    ]


def _waiting(records: Sequence[StepRecord]) -> float:
    waited_s = sum(record.metrics["batch_wait_s"] for record in records)
    return waited_s / (waited_s + sum(record.train_s for record in records))


def _records(
    sizes: TrainerSizes, folder: Path, rows: Sequence[TrainingRow], *, link_s: float, prefetches: bool = False
) -> list[StepRecord]:
    """What each step but the first, which no other came before, took."""
    folder.mkdir()
    source, records = cast("BatchSource", _FarRows(rows, link_s=link_s)), list[StepRecord]()
    progress = Progress()
    progress.on_step = records.append
    ahead = ReadAhead(source, lease_s=_LEASE_S) if prefetches else None
    run_loop(sizes, folder, RankBatches(source, OneRank(), ahead=ahead), progress=progress)
    return records[1:]
