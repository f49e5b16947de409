"""Whether a run that is asked for is the one that exists: by what its author wrote, its code and its store.

Pure. Defaults of releases are no part of it. Called by the registry when a run is created that is there already.
"""

from astraflow.dataflow.v1 import run_pb2
from astraflow.errors import ConflictError
from astraflow.recipe.file import parse_recipe
from astraflow.recipe_changes import code_differences, differences, file_digests, resume


def require_same(stored: run_pb2.Run, *, asked: run_pb2.Run) -> None:
    """Raise ConflictError naming what differs. Raises RecipeError where one of the recipes cannot be read."""
    code = code_differences(file_digests(asked.code.files), run=file_digests(stored.code.files))
    found = {
        "recipe": _recipe_differences(stored, asked),
        "code": code,
        "store": f"{stored.store_uri}, not {asked.store_uri}" if stored.store_uri != asked.store_uri else "",
    }
    if named := [f"another {what} ({details})" for what, details in found.items() if details]:
        raise ConflictError(
            f"run {asked.run_id} exists with {', '.join(named)}; choose another run name, or remove the old run's "
            "data; a folder that was moved belongs where it was"
        )


def _recipe_differences(stored: run_pb2.Run, asked: run_pb2.Run) -> str:
    if stored.recipe_yaml == asked.recipe_yaml:
        return ""
    name = f"recipe of run {stored.run_id}"
    run = parse_recipe(stored.recipe_yaml, source=name)
    wanted = parse_recipe(asked.recipe_as_written or asked.recipe_yaml, source=name)
    recipe = resume(wanted, run=run, written=stored.recipe_as_written).loaded.recipe
    return "; ".join(f"{key}: {was} → {now}" for key, (was, now) in differences(run.recipe, recipe).items())
