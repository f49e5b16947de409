"""Hands finished steps to experiment trackers, each in a thread of its own.

Invariant: training never waits for a tracker and never ends by one. A tracker that fails is said once, opened again
after a while, and its missed steps are counted; steps that it has are not sent again, also not after a restart.
"""

from __future__ import annotations

import json
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from astraflow.recipe.trackers import AnyTracker
from astraflow_kit.log import get_logger
from astraflow_kit.metrics import Metrics
from astraflow_trainer.progress import StepRecord
from astraflow_trainer.trackers.adapters import Subject, Tracker, open_tracker

log = get_logger(__name__)

MOST_WAITING = 256
"""Steps that wait for a slow tracker; later ones are missed."""
RETRY_S = 30.0
CLOSE_S = 20.0
"""How long the end of a trainer waits for one tracker."""


@dataclass(frozen=True)
class TrackerFault:
    """That a tracker does not have all steps."""

    tracker: str
    error: str
    """Of the newest step that it missed."""
    steps_missed: int


@dataclass
class _Position:
    """Where a tracker stands, kept in a file."""

    path: Path
    run: str = ""
    step: int = 0

    @classmethod
    def read(cls, path: Path) -> _Position:
        """What an earlier process kept; the beginning where there is nothing, or nothing that can be read."""
        try:
            kept = json.loads(path.read_text())
            return cls(path, run=str(kept["run"]), step=int(kept["step"]))
        except (OSError, ValueError, TypeError, KeyError):
            return cls(path)

    def keep(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        written = self.path.with_suffix(".new")
        written.write_text(json.dumps({"run": self.run, "step": self.step}))
        written.replace(self.path)


class TrackerFeed:
    """One tracker's queue and thread. `open_run` takes the id of the run to continue and the next step."""

    def __init__(
        self, kind: str, open_run: Callable[[str, int], Tracker], *, folder: Path, metrics: Metrics
    ) -> None:
        self.kind = kind
        self.fault: TrackerFault | None = None
        """What it failed at last, and how many steps it has missed; None while it has missed none."""
        self._open_run = open_run
        self._metrics = metrics
        self._position = _Position.read(folder / f"{kind}.json")
        self._waiting: queue.SimpleQueue[StepRecord | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._tracker: Tracker | None = None
        self._fails = False
        self._retry_at_s = 0.0
        # It may hang in a call; the process then ends without it.
        self._thread = threading.Thread(target=self._run, name=f"tracker-{kind}", daemon=True)
        self._thread.start()

    def put(self, record: StepRecord) -> None:
        """Queue a step; returns at once."""
        if self._waiting.qsize() >= MOST_WAITING:
            self._missed(f"it is {MOST_WAITING} steps behind")
            return
        self._waiting.put(record)

    def close(self) -> None:
        """Write what waits and close the run; gives up after CLOSE_S."""
        self._waiting.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("tracker.not_closed", tracker=self.kind, waited_s=CLOSE_S)

    def _run(self) -> None:
        while (record := self._waiting.get()) is not None:
            if record.step > self._position.step:
                self._take(record)
        self._close_run()

    def _take(self, record: StepRecord) -> None:
        position = self._position
        if self._tracker is None and time.monotonic() < self._retry_at_s:
            self._missed(self.fault.error if self.fault else "")
            return
        try:
            if self._tracker is None:
                self._tracker = self._open_run(position.run, position.step + 1)
                position.run = self._tracker.run_id
            self._tracker.log(record.step, _shown(record))
            position.step = record.step
            position.keep()
        except Exception as error:  # noqa: BLE001 - whatever a library raises, training goes on
            self._missed(f"{type(error).__name__}: {error}")
            self._retry_at_s = time.monotonic() + RETRY_S
            self._close_run()
            return
        self._fails = False

    def _missed(self, error: str) -> None:
        with self._lock:
            missed = (self.fault.steps_missed if self.fault else 0) + 1
            self.fault = TrackerFault(self.kind, error=error, steps_missed=missed)
        self._metrics.increment("astraflow_trainer_tracker_missed_steps_total", tracker=self.kind)
        if not self._fails:
            self._fails = True
            log.warning("tracker.failed", tracker=self.kind, message=error, retry_s=RETRY_S)

    def _close_run(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is None:
            return
        try:
            tracker.close()
        except Exception as error:  # noqa: BLE001 - as above
            log.warning("tracker.close_failed", tracker=self.kind, message=f"{type(error).__name__}: {error}")


@contextmanager
def feeds(
    trackers: Sequence[AnyTracker], subject: Subject, *, metrics: Metrics
) -> Iterator[Sequence[TrackerFeed]]:
    """Feeds of these trackers while the block runs; its end waits for them, each for CLOSE_S at most."""
    opened = [
        TrackerFeed(
            tracker.kind, partial(open_tracker, tracker, subject), folder=subject.folder, metrics=metrics
        )
        for tracker in trackers
    ]
    try:
        yield opened
    finally:
        for feed in opened:
            feed.close()


def _shown(record: StepRecord) -> Mapping[str, float]:
    timed = {**record.metrics, "wait_s": record.wait_s, "train_s": record.train_s}
    return {name: value for name, value in timed.items() if math.isfinite(value)}
