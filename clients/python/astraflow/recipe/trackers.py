"""Experiment trackers that a trainer feeds, chosen by `kind`. Addresses and keys are never part of a recipe: they come
from the variables that each tracker's own package reads.
"""

from typing import Annotated, Literal

from pydantic import Field

from astraflow.recipe.section import BY_KIND, Kind

__all__ = ["AnyTracker", "MlflowTracker", "TensorboardTracker", "WandbTracker"]

Label = Annotated[str, Field(min_length=1, max_length=128)]


class TensorboardTracker(Kind):
    """Event files below `tensorboard` of the trainer's work folder."""

    kind: Literal["tensorboard"] = "tensorboard"
    """The name of this tracker."""


class WandbTracker(Kind):
    """Runs of Weights & Biases, one a policy, in one group. WANDB_API_KEY, WANDB_BASE_URL and WANDB_MODE say where."""

    kind: Literal["wandb"] = "wandb"
    """The name of this tracker."""
    project: Label = "astraflow"
    """Project of the runs."""
    entity: Label | None = None
    """User or team; unset takes that of the key."""
    name: Label | None = None
    """Name that pages show; unset takes run and policy."""
    tags: list[Label] = Field(default=[], max_length=32)
    """Tags of the runs."""


class MlflowTracker(Kind):
    """A run of MLflow for each policy. MLFLOW_TRACKING_URI says where; unset means files below the work folder."""

    kind: Literal["mlflow"] = "mlflow"
    """The name of this tracker."""
    experiment: Label = "astraflow"
    """Experiment of the runs."""
    name: Label | None = None
    """Name that pages show; unset takes run and policy."""


AnyTracker = Annotated[TensorboardTracker | WandbTracker | MlflowTracker, BY_KIND]
