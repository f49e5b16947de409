"""TensorBoard, Weights & Biases and MLflow themselves, offline: what is logged can be read back with their own readers,
and a run that is opened again is continued.
"""

import importlib.util
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from astraflow.errors import InvalidArgumentError
from astraflow.recipe.trackers import AnyTracker, MlflowTracker, TensorboardTracker, WandbTracker
from astraflow_trainer.trackers.adapters import Subject, open_tracker, require_installed

pytestmark = pytest.mark.slow

Points = list[tuple[int, float]]


def subject(folder: Path) -> Subject:
    return Subject(run_id="run-1", policy_id="solver", folder=folder, settings={"run": {"name": "run-1"}})


def logged_twice(tracker: AnyTracker, folder: Path) -> None:
    """Two lives: steps 1 and 2, then 3."""
    first = open_tracker(tracker, subject(folder), "", 1)
    first.log(1, {"reward_mean": 0.25, "reward_mean/solver": 0.125})
    first.log(2, {"reward_mean": 0.5})
    first.close()
    second = open_tracker(tracker, subject(folder), first.run_id, 3)
    second.log(3, {"reward_mean": 0.75})
    second.close()


def in_tensorboard(folder: Path) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(item.step, item.value) for item in events.Scalars("train/reward_mean")]


def in_mlflow(folder: Path) -> Points:
    from mlflow import MlflowClient

    client = MlflowClient((folder / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("sums")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run-1/solver", "FINISHED")
    history = client.get_metric_history(run.info.run_id, "train/reward_mean")
    return [(item.step, item.value) for item in history]


def in_wandb(folder: Path) -> Points:
    """The records of both lives' files, in order; both have one id, so a server joins them."""
    from wandb.proto.wandb_internal_pb2 import Record

    points, runs = [], set()
    for path in sorted(
        folder.glob("wandb/offline-run-*/*.wandb"), key=lambda found: found.stat().st_mtime_ns
    ):
        for data in _entries(path.read_bytes()):
            record = Record.FromString(data)
            if record.HasField("run"):
                run = record.run
                runs.add((run.run_id, run.project, run.run_group, run.display_name))
            for item in record.history.item:
                if (item.key or item.nested_key[0]) == "train/reward_mean":
                    points.append((record.history.step.num, float(item.value_json)))
    assert [named for _, *named in runs] == [["sums", "run-1", "run-1/solver"]]
    return points


def _entries(data: bytes) -> Iterator[bytes]:
    """Entries of a LevelDB log, which these files are: blocks of 32 KiB, each piece with checksum, length and kind."""
    position, entry = 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:  # too little for another piece
            position += 32768 - position % 32768
        _, length, kind = struct.unpack_from("<IHB", data, position)
        entry += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole entry, or the last piece of one
            yield entry
            entry = b""


@pytest.mark.parametrize(
    ("tracker", "read"),
    [
        (TensorboardTracker(), in_tensorboard),
        (MlflowTracker(experiment="sums"), in_mlflow),
        (WandbTracker(project="sums"), in_wandb),
    ],
    ids=["tensorboard", "mlflow", "wandb"],
)
def test_a_run_that_is_opened_again_is_continued(
    tracker: AnyTracker, read: Callable[[Path], Points], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    logged_twice(tracker, tmp_path)
    assert read(tmp_path) == [(1, 0.25), (2, 0.5), (3, 0.75)]


def test_tensorboard_shows_a_step_once_that_a_killed_trainer_had_written_but_not_kept(tmp_path: Path) -> None:
    logged_twice(TensorboardTracker(), tmp_path)
    again = open_tracker(TensorboardTracker(), subject(tmp_path), "files", 3)
    again.log(3, {"reward_mean": 0.875})
    again.close()
    assert in_tensorboard(tmp_path) == [(1, 0.25), (2, 0.5), (3, 0.875)]


def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else object())
    require_installed([TensorboardTracker()])
    with pytest.raises(InvalidArgumentError, match=r"pip install 'astraflow\[wandb\]'"):
        require_installed([TensorboardTracker(), WandbTracker()])
