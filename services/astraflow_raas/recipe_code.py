"""The recipe's own code on this node: checked against its digest, written to the work folder, only with
leave.

Invariant: no byte of a recipe's code reaches the disk unless the node was started with `allow_recipe_code`,
the bundle has the digest that pins it, and every path stays inside its folder; a folder is complete or
absent. Called by `server` when the node has joined.
"""

import re
import shutil
import tempfile
from pathlib import Path
from typing import cast

from astraflow.dataflow.v1 import run_pb2
from astraflow.errors import PluginError, RecipeError
from astraflow.plugins import Reward, Workflow
from astraflow.recipe import Recipe
from astraflow.recipe_file import CodeFile, bundle_digest
from astraflow_kit.plugins import RECIPE_MODULE, load

_SAFE_PATH = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*/)*[A-Za-z0-9_][A-Za-z0-9_.-]*\.py")


def install_code(bundle: run_pb2.CodeBundle, *, into: Path, allowed: bool) -> Path | None:
    """Write the bundle below `into` and return its folder; None when there is none or it is not allowed.

    Idempotent: one folder per digest. Raises RecipeError when the bundle is not what its digest says.
    """
    if not bundle.files or not allowed:
        return None
    files = [CodeFile(file.path, file.content) for file in bundle.files]
    if bundle_digest(files) != bundle.sha256:
        raise RecipeError(
            f"the recipe's code has digest {bundle_digest(files).hex()[:16]}…, the run pins "
            f"{bundle.sha256.hex()[:16]}…; the server's data is damaged, create the run again"
        )
    for file in files:
        if not _SAFE_PATH.fullmatch(file.path):
            raise RecipeError(
                f"the recipe's code holds {file.path!r}; only plain relative paths to .py files are allowed"
            )
    folder = into / bundle.sha256.hex()
    if not folder.is_dir():
        _write(files, folder=folder)
    return folder


def require_installed(recipe: Recipe, *, folder: Path | None) -> None:
    """Refuse a recipe that needs its own code when it is not here. Raises PluginError with the remedy."""
    plugins = (recipe.raas.workflow, recipe.raas.reward)
    own = [plugin for plugin in plugins if plugin.partition(":")[0] == RECIPE_MODULE]
    if own and folder is None:
        raise PluginError(
            f"the run's plug-ins {', '.join(own)} are code of its recipe, which this node may not run; "
            "start it with --allow-recipe-code if you trust whoever created the run, or install the code as a "
            "package"
        )


def load_workflow(recipe: Recipe, *, folder: Path | None) -> Workflow:
    """Make the recipe's workflow with its reward. Raises PluginError naming the plug-in and the remedy."""
    require_installed(recipe, folder=folder)
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


def _write(files: list[CodeFile], *, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix="incoming-", dir=folder.parent))
    try:
        for file in files:
            path = draft / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.content)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
