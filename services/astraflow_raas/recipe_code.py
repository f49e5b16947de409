"""The recipe's workflow and reward on this node, made once, before it joins.

Invariant: what it returns satisfies the plug-in Protocols, has its settings, and plays the roles that the recipe gives
to policies; code of the recipe itself is written and run only with leave. Called by `server`.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from astraflow.agents import AgentEndpoint
from astraflow.dataflow.v1 import run_pb2
from astraflow.errors import RecipeError
from astraflow.plugins import Reward, Workflow
from astraflow.recipe import Recipe, ResolvedRole, declared_roles, workflow_roles
from astraflow.recipe.file import place_of
from astraflow.recipe.plugin_settings import PluginSettings
from astraflow_kit.plugins import RecipeSource, load, make
from astraflow_kit.recipe_code import install_code
from astraflow_raas.environments.recipe_environments import RecipeEnvironments
from astraflow_raas.environments.served import ServedEnvironments
from astraflow_raas.grading.scoring import RewardScorer, make_scorer


@dataclass(frozen=True, kw_only=True)
class RecipeWorkflow:
    """A run's workflow, made."""

    workflow: Workflow
    scorer: RewardScorer | None
    """The reward, which the workflow holds as well; its worker processes live as long as the node."""
    roles: Mapping[str, ResolvedRole]
    """The run's roles by the names that the workflow uses."""


def load_workflow(
    run: run_pb2.Run,
    recipe: Recipe,
    *,
    into: Path,
    scratch: Path,
    allowed: bool,
    endpoint: AgentEndpoint,
    served: ServedEnvironments,
) -> RecipeWorkflow:
    """Make the recipe's workflow with its reward, and with the node's `endpoint`, `environments`, `recipe_dir` and
    `scratch_dir` if it names those.

    The run's own code lies below `into`, when it is `allowed`; else `recipe_dir` is None.

    Raises PluginError naming the plug-in, RecipeError for roles that do not fit; both with the remedy.
    """
    folder = install_code(run.code, into=into, allowed=allowed)
    source = RecipeSource(name=f"recipe of run {run.run_id}", text=run.recipe_yaml, folder=folder)
    settings = recipe.raas
    offered: dict[str, object] = {
        "endpoint": endpoint,
        "environments": RecipeEnvironments(source, served=served),
        "recipe_dir": (folder or into) if allowed else None,
        "scratch_dir": scratch,
    }
    reward = scorer = None
    if settings.reward is not None:
        reward = make(settings.reward, protocol=Reward, source=source)
        scorer = make_scorer(reward, settings.reward, source=source, given=settings.reward_limits)
        offered["reward"] = scorer
    elif _requires_reward(settings.workflow, source=source):
        raise RecipeError(
            f"raas.reward is missing, and {settings.workflow.use} cannot do without; name a reward"
        )
    workflow = make(settings.workflow, protocol=Workflow, source=source, **offered)
    try:
        declared = declared_roles(workflow, reward)
        roles = workflow_roles(declared, roles=recipe.resolved_roles, are_given=bool(recipe.roles))
    except (TypeError, ValueError) as error:
        place = place_of(settings.workflow, source.text, source=source.name)
        raise RecipeError(f"{place}: {settings.workflow.use}: {error}") from error
    return RecipeWorkflow(workflow=workflow, scorer=scorer, roles=roles)


def _requires_reward(workflow: PluginSettings, *, source: RecipeSource) -> bool:
    found = load(workflow.use, protocol=Workflow, recipe_dir=source.folder)
    parameters = inspect.signature(found).parameters if isinstance(found, type) else {}
    return "reward" in parameters and parameters["reward"].default is inspect.Parameter.empty
