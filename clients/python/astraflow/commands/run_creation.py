"""`astraflow runs create`: a run from a recipe, on a store that was proven first. The launcher makes its runs with
`run_of`, too.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

from astraflow.client import Client
from astraflow.dataflow.v1 import run_pb2
from astraflow.dataflow.v1 import run_service_pb2 as pb
from astraflow.errors import InvalidArgumentError
from astraflow.recipe.file import LoadedRecipe

__all__ = ["StoreOption", "create_run", "prepare_store", "run_of"]

_TIMEOUT_S = 30.0

StoreOption = Annotated[
    str, typer.Option("--store", metavar="URI", help="Weight store: s3://bucket/prefix or file:///folder.")
]


def run_of(loaded: LoadedRecipe, *, run_id: str, store_uri: str, recipe_yaml: str = "") -> run_pb2.Run:
    """Return the run of a recipe and its code. `recipe_yaml`: its text where the run was created with another."""
    files = [run_pb2.CodeFile(path=file.path, content=file.content) for file in loaded.code]
    return run_pb2.Run(
        run_id=run_id,
        recipe_yaml=recipe_yaml or loaded.yaml_text,
        code=run_pb2.CodeBundle(files=files, sha256=loaded.code_sha256),
        store_uri=store_uri,
    )


def create_run(client: Client, run: run_pb2.Run) -> run_pb2.Run:
    """Create the run, or return it as it is when an equal one exists. Raises ConflictError, RecipeError."""
    return client.call(client.runs.CreateRun, pb.CreateRunRequest(run=run), timeout_s=_TIMEOUT_S).run


def prepare_store(uri: str) -> str:
    """Make the store ready and return what was found. Raises what makes it unusable, with the remedy."""
    if uri.startswith("file:") and not Path(uri.removeprefix("file://")).is_absolute():
        raise InvalidArgumentError(f"--store {uri}: write file:///absolute/folder, with three slashes")
    try:
        # Named, not imported: the public package needs no store, and where none is installed nobody can prove one.
        preparation = importlib.import_module("astraflow_weights.tools.store_preparation")
    except ModuleNotFoundError as error:
        raise InvalidArgumentError(
            f"proving the store needs the package {error.name!r}; run: pip install 'astraflow[raas]', or give "
            "--no-probe: then its first trainer proves it"
        ) from error
    found: str = preparation.prepare_store(uri)
    return found
