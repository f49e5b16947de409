"""The recipe's workflow and reward on this node, made once, before it joins.

Invariant: what it returns satisfies the plug-in Protocols, has its settings, and plays the roles that the recipe gives
to policies; code of the recipe itself is written and run only with leave. Called by `server`.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astraflow.agents import AgentEndpoint
from astraflow.dataflow.v1 import run_pb2
from astraflow.errors import RecipeError
from astraflow.plugins import Episode, Policy, Reward, TaskSpec, Workflow
from astraflow.recipe import Grading, Recipe, ResolvedRole, declared_roles, workflow_roles
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
    scorers: Mapping[str, RewardScorer]
    """The rewards by source, which the workflows hold as well; their worker processes live as long as the node."""
    roles: Mapping[str, ResolvedRole]
    """The run's roles by the names that the workflow uses."""

    @property
    def own_scorers(self) -> list[RewardScorer]:
        """Each reward once; sources with the same workflow and reward share them."""
        return list({id(scorer): scorer for scorer in self.scorers.values()}.values())


class BySource:
    """Runs each task by the workflow of its source."""

    def __init__(self, workflows: Mapping[str, Workflow]) -> None:
        self._workflows = workflows

    async def run(self, task: TaskSpec, policies: Mapping[str, Policy]) -> Episode:
        """Run the task. Raises ValueError for one of a source that the recipe does not have."""
        name = task.source.partition("/")[0]
        if name not in self._workflows:
            raise ValueError(
                f"task {task.task_id} has source {name!r}, which is none of run.sources: {', '.join(self._workflows)}"
            )
        return await self._workflows[name].run(task, policies)


def load_workflow(
    run: run_pb2.Run,
    recipe: Recipe,
    *,
    into: Path,
    scratch: Path,
    allowed: bool,
    endpoint: AgentEndpoint,
    served: ServedEnvironments,
    secrets: Sequence[Path] = (),
) -> RecipeWorkflow:
    """Make the recipe's workflow with its reward, and with the node's `endpoint`, `environments`, `recipe_dir`,
    `scratch_dir` and `secret_paths` if it names those.

    The run's own code lies below `into`, when it is `allowed`; else `recipe_dir` is None.

    Raises PluginError naming the plug-in, RecipeError for roles that do not fit; both with the remedy.
    """
    folder = install_code(run.code, into=into, allowed=allowed)
    source = RecipeSource(name=f"recipe of run {run.run_id}", text=run.recipe_yaml, folder=folder)
    offered: dict[str, object] = {
        "endpoint": endpoint,
        "environments": RecipeEnvironments(source, served=served),
        "recipe_dir": (folder or into) if allowed else None,
        "scratch_dir": scratch,
        "secret_paths": tuple(secrets),
    }
    made: dict[str, _Made] = {}
    for name, grading in recipe.grading.items():
        same = next((known for known in made.values() if known.grading == grading), None)
        made[name] = same or _make(grading, recipe, source=source, offered=offered)
    declared = [one.declared_roles for one in made.values()]
    unclear = [one for one in declared if one is None or isinstance(one, str)]
    roles = unclear[0] if unclear else [role for one in declared for role in one]
    first = next(iter(made.values())).grading.workflow
    try:
        played = workflow_roles(roles, roles=recipe.resolved_roles, are_given=bool(recipe.roles))
    except (TypeError, ValueError) as error:
        place = place_of(first, source.text, source=source.name)
        raise RecipeError(f"{place}: {first.use}: {error}") from error
    workflows = {name: one.workflow for name, one in made.items()}
    return RecipeWorkflow(
        workflow=BySource(workflows) if recipe.run.sources else workflows[""],
        scorers={name: one.scorer for name, one in made.items() if one.scorer},
        roles=played,
    )


@dataclass(frozen=True)
class _Made:
    """Workflow and reward of one or more sources."""

    grading: Grading
    workflow: Workflow
    scorer: RewardScorer | None
    declared_roles: Any


def _make(grading: Grading, recipe: Recipe, *, source: RecipeSource, offered: Mapping[str, object]) -> _Made:
    reward = scorer = None
    if grading.reward is not None:
        reward = make(grading.reward, protocol=Reward, source=source)
        scorer = make_scorer(reward, grading.reward, source=source, given=recipe.raas.reward_limits)
        offered = {**offered, "reward": scorer}
    elif _requires_reward(grading.workflow, source=source):
        raise RecipeError(
            f"raas.reward is missing, and {grading.workflow.use} cannot do without; name a reward"
        )
    workflow = make(grading.workflow, protocol=Workflow, source=source, **offered)
    return _Made(grading, workflow, scorer, declared_roles(workflow, reward))


def _requires_reward(workflow: PluginSettings, *, source: RecipeSource) -> bool:
    found = load(workflow.use, protocol=Workflow, recipe_dir=source.folder)
    parameters = inspect.signature(found).parameters if isinstance(found, type) else {}
    return "reward" in parameters and parameters["reward"].default is inspect.Parameter.empty
