"""The recipe: what it may say (`settings`, `roles`, `algorithm`), how it is read (`file`) and checked (`command`)."""

from astraflow.recipe.model import (
    ArchitectureSettings,
    ExternalSettings,
    LoraSettings,
    ModelSettings,
    TokenizerSettings,
    WarmStartSettings,
)
from astraflow.recipe.roles import ResolvedRole, RoleSettings, declared_roles, workflow_roles
from astraflow.recipe.settings import (
    SCHEMA_VERSION,
    BatchSettings,
    DataflowSettings,
    EvaluationSettings,
    OptimizerSettings,
    PolicySettings,
    PublishSettings,
    RaasSettings,
    Recipe,
    ResolvedPolicy,
    RunSettings,
    SamplingSettings,
    TrainerSettings,
    json_schema,
)
from astraflow.recipe.stored_version import StoredVersionSettings

__all__ = [
    "SCHEMA_VERSION",
    "ArchitectureSettings",
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
