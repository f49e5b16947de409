"""The recipe's workflow and reward on this node, made once, when it has joined.

Invariant: what it returns satisfies the plug-in Protocols; code of the recipe itself is used only from the folder that
`astraflow_kit.recipe_code` wrote with leave. Called by `assembly`.
"""

from pathlib import Path
from typing import cast

from astraflow.errors import PluginError
from astraflow.plugins import Reward, Workflow
from astraflow.recipe import Recipe
from astraflow_kit.plugins import load
from astraflow_kit.recipe_code import require_installed


def load_workflow(recipe: Recipe, *, folder: Path | None) -> Workflow:
    """Make the recipe's workflow with its reward. Raises PluginError naming the plug-in and the remedy."""
    require_installed(recipe.raas.workflow, recipe.raas.reward, folder=folder)
    reward = load(recipe.raas.reward, protocol=Reward, recipe_dir=folder)
    if isinstance(reward, type):
        reward = _made(recipe.raas.reward, reward)
    workflow = load(recipe.raas.workflow, protocol=Workflow, recipe_dir=folder)
    if isinstance(workflow, type):
        workflow = _made(recipe.raas.workflow, workflow, reward=reward)
    return cast("Workflow", workflow)


def _made(name: str, kind: type, **arguments: object) -> object:
    try:
        made: object = kind(**arguments)
    except Exception as error:  # the plug-in's own constructor may raise anything
        given = ", ".join(f"{argument}=…" for argument in arguments)
        raise PluginError(
            f"plug-in {name!r} cannot be made with {kind.__name__}({given}): {type(error).__name__}: {error}"
        ) from error
    return made
