"""The recipe's workflow and reward on this node, made once, before it joins.

Invariant: what it returns satisfies the plug-in Protocols and has its settings; code of the recipe itself is written
and run only with leave. Called by `server`.
"""

from pathlib import Path

from astraflow.agents import AgentEndpoint
from astraflow.dataflow.v1 import run_pb2
from astraflow.plugins import Reward, Workflow
from astraflow.recipe import RaasSettings
from astraflow_kit.plugins import RecipeSource, make
from astraflow_kit.recipe_code import install_code


def load_workflow(
    run: run_pb2.Run, settings: RaasSettings, *, into: Path, allowed: bool, endpoint: AgentEndpoint
) -> Workflow:
    """Make the recipe's workflow with its reward, and with the node's `endpoint` if it names that.

    The run's own code lies below `into`, when it is `allowed`.

    Raises PluginError naming the plug-in and the remedy.
    """
    folder = install_code(run.code, into=into, allowed=allowed)
    source = RecipeSource(name=f"recipe of run {run.run_id}", text=run.recipe_yaml, folder=folder)
    reward = make(settings.reward, protocol=Reward, source=source)
    return make(settings.workflow, protocol=Workflow, source=source, reward=reward, endpoint=endpoint)
