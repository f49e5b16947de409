"""Policy losses: aggregation weights, step-wide bounds, the kernel and its statistics."""

from astraflow_trainer.step.losses.aggregation import StepCounts, token_weights
from astraflow_trainer.step.losses.kernel import (
    LossInputs,
    cuts_alike,
    policy_loss,
    resolve_region,
)
from astraflow_trainer.step.losses.statistics import LossMetrics, LossStatistics
from astraflow_trainer.step.losses.trust_regions import StepRegion

__all__ = [
    "LossInputs",
    "LossMetrics",
    "LossStatistics",
    "StepCounts",
    "StepRegion",
    "cuts_alike",
    "policy_loss",
    "resolve_region",
    "token_weights",
]
