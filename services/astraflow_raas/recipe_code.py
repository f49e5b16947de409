"""The recipe's workflow and reward on this node, made once, before it joins.

Invariant: what it returns satisfies the plug-in Protocols and has its settings; code of the recipe itself is written
and run only with leave. Called by `server`.
"""

from pathlib import Path
from typing import NamedTuple

from astraflow.agents import AgentEndpoint
from astraflow.dataflow.v1 import run_pb2
from astraflow.plugins import Reward, Workflow
from astraflow.recipe import RaasSettings
from astraflow_kit.plugins import RecipeSource, make
from astraflow_kit.recipe_code import install_code
from astraflow_raas.grading.scoring import RewardScorer, make_scorer


class NodePlugins(NamedTuple):
    """What the recipe runs on a node."""

    workflow: Workflow
    scorer: RewardScorer
    """The reward, which the workflow holds as well; its workers live as long as the node."""


def load_plugins(
    run: run_pb2.Run, settings: RaasSettings, *, into: Path, allowed: bool, endpoint: AgentEndpoint
) -> NodePlugins:
    """Make the recipe's workflow with its reward, and with the node's `endpoint` if it names that.

    The run's own code lies below `into`, when it is `allowed`.

    Raises PluginError naming the plug-in and the remedy.
    """
    folder = install_code(run.code, into=into, allowed=allowed)
    source = RecipeSource(name=f"recipe of run {run.run_id}", text=run.recipe_yaml, folder=folder)
    reward = make(settings.reward, protocol=Reward, source=source)
    scorer = make_scorer(reward, settings.reward, source=source, given=settings.reward_limits)
    workflow = make(settings.workflow, protocol=Workflow, source=source, reward=scorer, endpoint=endpoint)
    return NodePlugins(workflow, scorer)
