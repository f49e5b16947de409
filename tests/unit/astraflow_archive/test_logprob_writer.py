"""A trainer's log-probs are written beside training: for the archive's tasks, and never in its way."""

import threading
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from astraflow.dataflow.v1.batch_pb2 import Batch, BatchItem
from astraflow.dataflow.v1.sample_pb2 import Sample
from astraflow.recipe.dataflow import ArchiveSettings
from astraflow_archive import logprob_writer
from astraflow_archive.logprob_writer import LogprobWriter
from astraflow_archive.trainer_logprobs import TrainerLogprobs
from astraflow_weights.store import PutResult
from astraflow_weights.store.file import FileStore

KEPT = ArchiveSettings(trainer_logprobs=True)


def batch(step: int, num_tasks: int = 1) -> tuple[Batch, dict[str, np.ndarray]]:
    """A batch with a trajectory of each task, and what the trainer made of it."""
    items = [BatchItem(trajectory_id=f"t{task}", task_id=f"task{task}") for task in range(num_tasks)]
    made = {item.trajectory_id: np.full(2, -step, dtype=np.float32) for item in items}
    return Batch(policy_id="solver", step=step, items=items), made


def written(store: FileStore, step: int, name: str = "t0") -> bytes:
    """What the archive has of a trajectory."""
    sample = Sample(policy_id="solver", step=step, batch_id="b", item=BatchItem(trajectory_id=name))
    return TrainerLogprobs(store, "run").of(sample)


def test_only_tasks_in_the_share_of_the_archive_are_written(tmp_path: Path) -> None:
    store, half = FileStore(tmp_path), KEPT.model_copy(update={"share": 0.5})
    with LogprobWriter(store, "run", settings=half) as writer:
        writer.put(*batch(1, num_tasks=16))
    found = [task for task in range(16) if written(store, 1, f"t{task}")]
    assert found == [task for task in range(16) if half.has_task(f"task{task}")]
    assert 0 < len(found) < 16


def test_a_batch_of_which_nothing_was_trained_on_makes_no_file(tmp_path: Path) -> None:
    with LogprobWriter(store := FileStore(tmp_path), "run", settings=KEPT) as writer:
        writer.put(batch(1)[0], {})
    assert list(store.list("run/")) == []


def test_a_store_that_fails_is_said_once_and_later_steps_are_written(tmp_path: Path) -> None:
    (tmp_path / "blocked").write_text("")  # a file stands where the store's folder would be made
    store = FileStore(tmp_path / "blocked" / "store")
    with capture_logs() as logs:
        with LogprobWriter(store, "run", settings=KEPT) as writer:
            writer.put(*batch(1))
            writer.put(*batch(2))
        (tmp_path / "blocked").unlink()
        with LogprobWriter(store, "run", settings=KEPT) as writer:
            writer.put(*batch(3))
    assert [(entry["event"], entry["step"]) for entry in logs] == [("trainer_logprobs.failed", 1)]
    assert "blocked" in logs[0]["message"]
    assert [bool(written(store, step)) for step in (1, 2, 3)] == [False, False, True]


class Held(FileStore):
    """A store that does not answer until it is let go."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked, self.go = threading.Event(), threading.Event()

    def put_if_absent(self, key: str, data: bytes) -> PutResult:
        self.asked.set()
        self.go.wait()
        return super().put_if_absent(key, data)


def test_a_store_that_hangs_holds_up_neither_training_nor_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprob_writer, "MOST_WAITING", 2)
    monkeypatch.setattr(logprob_writer, "CLOSE_S", 0.01)
    store = Held(tmp_path)
    try:
        with capture_logs() as logs, LogprobWriter(store, "run", settings=KEPT) as writer:
            writer.put(*batch(1))
            assert store.asked.wait(60)
            for step in (2, 3, 4, 5):
                writer.put(*batch(step))
    finally:
        store.go.set()
    assert [(entry["event"], entry.get("step")) for entry in logs] == [
        ("trainer_logprobs.failed", 4),
        ("trainer_logprobs.not_written", None),
    ]
