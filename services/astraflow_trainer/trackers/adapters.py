"""The three trackers behind one Protocol. Their packages are optional and slow to import, so each is imported where it
is opened.

Invariant: only numbers go out, under `train/NAME`; nothing is read back. Called by `feed`, from a thread of its own.
"""

import importlib.util
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from astraflow.errors import InvalidArgumentError
from astraflow.recipe.trackers import AnyTracker, MlflowTracker, TensorboardTracker, WandbTracker

_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


class Tracker(Protocol):
    """An open run of a tracker. Blocking; whatever it raises is its own failure and never the training's."""

    @property
    def run_id(self) -> str:
        """What continues this run when it is opened again."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the finite metrics of a step; they are safe from the end of this process when it returns."""

    def close(self) -> None:
        """Mark the run as ended."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is tracked."""

    run_id: str
    policy_id: str
    folder: Path
    """Where files of trackers go."""
    settings: Mapping[str, Any]
    """The recipe, for the trackers that show it."""

    @property
    def name(self) -> str:
        """What people see."""
        return f"{self.run_id}/{self.policy_id}"


def require_installed(trackers: Sequence[AnyTracker]) -> None:
    """Raise InvalidArgumentError, with the command that installs it, for a tracker whose package is missing."""
    for tracker in trackers:
        package = _PACKAGES[tracker.kind]
        if importlib.util.find_spec(package) is None:
            raise InvalidArgumentError(
                f"trainer.trackers names {tracker.kind}, and the package {package!r} is not installed here; run: "
                f"pip install 'astraflow[{tracker.kind}]', or take it out of the recipe"
            )


def open_tracker(tracker: AnyTracker, subject: Subject, run_id: str, next_step: int) -> Tracker:
    """Open the run `run_id`, or a new one where that is empty. No step from `next_step` on was logged before."""
    if isinstance(tracker, TensorboardTracker):
        return _Tensorboard(subject, next_step=next_step)
    if isinstance(tracker, WandbTracker):
        return _Wandb(tracker, subject, run_id=run_id)
    return _Mlflow(tracker, subject, run_id=run_id)


class _Tensorboard:
    run_id = "files"

    def __init__(self, subject: Subject, *, next_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What an earlier process wrote of these steps, if anything, is then not shown.
        self._writer = SummaryWriter(str(subject.folder / "tensorboard"), purge_step=next_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(f"train/{name}", value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, tracker: WandbTracker, subject: Subject, *, run_id: str) -> None:
        import wandb

        self._library = wandb
        self.run_id = run_id or uuid.uuid4().hex[:16]
        self._run = wandb.init(
            project=tracker.project,
            entity=tracker.entity,
            name=tracker.name or subject.name,
            group=subject.run_id,
            job_type="trainer",
            tags=tracker.tags,
            id=self.run_id,
            resume="allow",
            dir=subject.folder,
            config=dict(subject.settings),
            # Neither the log nor the code of a run is for others to see by accident.
            settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({f"train/{name}": value for name, value in metrics.items()}, step=step, commit=True)

    def close(self) -> None:
        self._run.finish()
        self._library.teardown()  # its own process, which would else end with this one at the earliest


class _Mlflow:
    def __init__(self, tracker: MlflowTracker, subject: Subject, *, run_id: str) -> None:
        from mlflow import MlflowClient
        from mlflow.environment_variables import MLFLOW_ALLOW_FILE_STORE
        from mlflow.tracking import is_tracking_uri_set

        uri = None
        if not is_tracking_uri_set():
            # Files need no server and no database; MLflow refuses them unless they are asked for.
            MLFLOW_ALLOW_FILE_STORE.set("true")
            uri = (subject.folder / "mlflow").absolute().as_uri()
        self._client = MlflowClient(uri)
        self.run_id = run_id or self._new_run(tracker, subject)
        self._client.update_run(self.run_id, status="RUNNING")

    def _new_run(self, tracker: MlflowTracker, subject: Subject) -> str:
        found = self._client.get_experiment_by_name(tracker.experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(tracker.experiment)
        tags = {"astraflow.run": subject.run_id, "astraflow.policy": subject.policy_id}
        run = self._client.create_run(experiment, run_name=tracker.name or subject.name, tags=tags)
        return str(run.info.run_id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        # In its files a name is a path, so none may be the folder of another.
        named = {f"train/{name.replace('/', '.')}": value for name, value in metrics.items()}
        self._client.log_batch(
            self.run_id, [Metric(name, value, now_ms, step) for name, value in named.items()]
        )

    def close(self) -> None:
        self._client.set_terminated(self.run_id)
