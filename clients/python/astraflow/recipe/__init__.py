"""The recipe: what it may say (`settings`, `roles`, `algorithm`), how it is read (`file`) and checked (`command`)."""

from astraflow.recipe.dataflow import (
    MAX_EVALUATION_SAMPLES,
    BatchSettings,
    DataflowSettings,
    EvaluationSettings,
)
from astraflow.recipe.model import (
    ArchitectureSettings,
    ExternalSettings,
    LoraSettings,
    ModelSettings,
    SamplingSettings,
    StoredVersionSettings,
    TokenizerSettings,
    WarmStartSettings,
)
from astraflow.recipe.roles import ResolvedRole, RoleSettings, declared_roles, workflow_roles
from astraflow.recipe.settings import (
    SCHEMA_VERSION,
    AverageSettings,
    OptimizerSettings,
    PolicySettings,
    PublishSettings,
    RaasSettings,
    Recipe,
    ResolvedPolicy,
    RowLimits,
    RunSettings,
    TrainerSettings,
    json_schema,
)

__all__ = [
    "MAX_EVALUATION_SAMPLES",
    "SCHEMA_VERSION",
    "ArchitectureSettings",
    "AverageSettings",
    "BatchSettings",
    "DataflowSettings",
    "EvaluationSettings",
    "ExternalSettings",
    "LoraSettings",
    "ModelSettings",
    "OptimizerSettings",
    "PolicySettings",
    "PublishSettings",
    "RaasSettings",
    "Recipe",
    "ResolvedPolicy",
    "ResolvedRole",
    "RoleSettings",
    "RowLimits",
    "RunSettings",
    "SamplingSettings",
    "StoredVersionSettings",
    "TokenizerSettings",
    "TrainerSettings",
    "WarmStartSettings",
    "declared_roles",
    "json_schema",
    "workflow_roles",
]
