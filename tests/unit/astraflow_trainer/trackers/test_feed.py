"""Steps reach a tracker in order and once; one that fails, hangs or is gone never stops training."""

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from astraflow_kit.metrics import Metrics
from astraflow_trainer.progress import StepRecord
from astraflow_trainer.trackers import feed
from astraflow_trainer.trackers.feed import TrackerFeed

MISSED = b'astraflow_trainer_tracker_missed_steps_total{tracker="scripted"}'


class Scripted:
    """A tracker that remembers, and fails at the steps it is told to."""

    run_id = "run-1"

    def __init__(self) -> None:
        self.logged: list[tuple[int, Mapping[str, float]]] = []
        self.opened: list[tuple[str, int]] = []
        self.closed = 0
        self.fails_at: set[int] = set()
        self.unreachable = False
        self.hold = threading.Event()
        self.hold.set()

    def open(self, run_id: str, next_step: int) -> "Scripted":
        self.opened.append((run_id, next_step))
        if self.unreachable:
            raise ConnectionError("no route to the tracker")
        return self

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.hold.wait()
        if step in self.fails_at:
            raise OSError(28, "No space left on device")
        self.logged.append((step, metrics))

    def close(self) -> None:
        self.closed += 1

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.logged]


@pytest.fixture
def tracker() -> Iterator[Scripted]:
    made = Scripted()
    yield made
    made.hold.set()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracker that failed is opened again at its next step."""
    monkeypatch.setattr(feed, "RETRY_S", 0.0)


def fed(tracker: Scripted, folder: Path, *steps: int, metrics: Metrics | None = None) -> TrackerFeed:
    """A feed that was given these steps and closed."""
    made = TrackerFeed("scripted", tracker.open, folder=folder, metrics=metrics or Metrics())
    for step in steps:
        made.put(record(step))
    made.close()
    return made


def record(step: int, **metrics: float) -> StepRecord:
    named = {"reward_mean": step / 10, **metrics}
    return StepRecord(step=step, version=step, finished_at_s=0.0, wait_s=0.5, train_s=2.0, metrics=named)


def test_each_step_is_logged_with_its_times_and_without_what_is_no_number(
    tracker: Scripted, tmp_path: Path
) -> None:
    made = TrackerFeed("scripted", tracker.open, folder=tmp_path, metrics=Metrics())
    made.put(record(1, grad_norm=float("nan")))
    made.close()
    assert tracker.logged == [(1, {"reward_mean": 0.1, "wait_s": 0.5, "train_s": 2.0})]
    assert (tracker.opened, tracker.closed, made.fault) == ([("", 1)], 1, None)


def test_a_restarted_trainer_continues_the_run_and_replayed_steps_are_not_sent_again(
    tracker: Scripted, tmp_path: Path
) -> None:
    fed(tracker, tmp_path, 1, 2, 3)
    fed(tracker, tmp_path, 2, 3, 4)
    assert tracker.steps == [1, 2, 3, 4]
    assert tracker.opened == [("", 1), ("run-1", 4)]


def test_a_position_that_cannot_be_read_begins_a_new_run(tracker: Scripted, tmp_path: Path) -> None:
    (tmp_path / "scripted.json").write_text('{"run": "run-1", "st')
    fed(tracker, tmp_path, 7)
    assert tracker.opened == [("", 1)]
    assert tracker.steps == [7]


@pytest.mark.usefixtures("at_once")
def test_a_step_that_fails_is_counted_and_the_next_ones_go_on(tracker: Scripted, tmp_path: Path) -> None:
    tracker.fails_at, metrics = {2}, Metrics()
    made = fed(tracker, tmp_path, 1, 2, 3, metrics=metrics)
    assert tracker.steps == [1, 3]
    assert made.fault is not None
    assert (made.fault.tracker, made.fault.steps_missed) == ("scripted", 1)
    assert "No space left on device" in made.fault.error
    assert MISSED + b" 1.0" in metrics.render()


def test_a_tracker_that_cannot_be_reached_is_asked_again_after_a_while_only(
    tracker: Scripted, tmp_path: Path
) -> None:
    tracker.unreachable = True
    made = fed(tracker, tmp_path, 1, 2, 3)
    assert len(tracker.opened) == 1
    assert made.fault is not None
    assert (made.fault.steps_missed, made.fault.error) == (3, "ConnectionError: no route to the tracker")


def test_a_tracker_that_hangs_holds_up_nobody(
    tracker: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "MOST_WAITING", 2)
    monkeypatch.setattr(feed, "CLOSE_S", 0.05)
    tracker.hold.clear()
    made = fed(tracker, tmp_path, *range(1, 9))
    assert tracker.steps == []
    assert made.fault is not None
    assert made.fault.error == "it is 2 steps behind"
    assert made.fault.steps_missed >= 5
