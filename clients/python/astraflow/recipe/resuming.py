"""Resuming a run by a release that may have other defaults than the one that created it.

Invariant: a run is what its author wrote. Where no author wrote a value, the run keeps the one that it was created
with; a key that its release did not know takes the default of this one. Both are said. Called by the launcher, by
`astraflow runs create` and by the dataflow server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from astraflow import __version__
from astraflow.dataflow.v1 import run_pb2
from astraflow.errors import IncompatibleError, RecipeError
from astraflow.recipe.document import Keys
from astraflow.recipe.file import CodeFile, LoadedRecipe, parse_recipe
from astraflow.recipe_changes import settings_of

__all__ = ["Resumed", "code_differences", "file_digests", "new_settings", "read_recipe_of", "resume"]

_CHOICES = ("kind", "preset")
"""Keys that decide which others there are beside them, or their defaults."""


@dataclass(frozen=True)
class Resumed:
    """The recipe that a run goes on with."""

    loaded: LoadedRecipe
    """What its author says now, over the defaults that the run was created with."""
    notes: tuple[str, ...]
    """What this release changed about defaults, a sentence for each key."""


def read_recipe_of(text: str, *, source: str, release: str) -> LoadedRecipe:
    """Return the resolved recipe of a run, which `release` wrote. Raises IncompatibleError where this release does not
    know what it holds.
    """
    try:
        return parse_recipe(text, source=source)
    except RecipeError as error:
        raise IncompatibleError(
            f"{source} was written by {release}, and astraflow {__version__} cannot read it: {error.message}; resume "
            "the run with the release that wrote it"
        ) from error


def resume(asked: LoadedRecipe, *, run: LoadedRecipe, written: str = "") -> Resumed:
    """Return `asked` with the values that no author wrote as `run` has them, which is the resolved recipe that the run
    was created with. `written` is what its author wrote then, as `LoadedRecipe.written`; '' where nobody kept it.
    """
    own, now = settings_of(run.recipe), settings_of(asked.recipe)
    kept = _kept(asked, run=run, written=written)
    overrides = [f"{'.'.join(keys)}={own[keys]}" for keys in kept]
    loaded = asked
    if overrides:
        read = parse_recipe(asked.yaml_text, overrides=overrides)
        loaded = replace(asked, recipe=read.recipe, yaml_text=read.yaml_text)
    notes = [
        f"{'.'.join(keys)} stays {own[keys]}, as the run was created; the default of this release is {now[keys]}"
        for keys in kept
    ]
    notes += [
        f"{'.'.join(keys)} is new in this release; the run takes its default, {value}"
        for keys, value in new_settings(run).items()
        if not asked.document.says(keys)
    ]
    return Resumed(loaded, tuple(notes))


def new_settings(run: LoadedRecipe) -> dict[Keys, str]:
    """Return the settings that the release did not know which resolved the recipe of a run, with the values that this
    one gives them, as JSON.
    """
    return {keys: value for keys, value in settings_of(run.recipe).items() if not run.document.says(keys)}


def file_digests(files: Iterable[CodeFile | run_pb2.CodeFile]) -> dict[str, str]:
    """Return the sha256 of each file of a recipe's code as hex, by path."""
    return {file.path: hashlib.sha256(file.content).hexdigest() for file in files}


def code_differences(asked: Mapping[str, str], *, run: Mapping[str, str]) -> str:
    """Return which files of a recipe's code, given as `file_digests`, are not those of a run; '' where all are."""
    found = {
        "changed": [path for path in run if asked.get(path, run[path]) != run[path]],
        "missing": [path for path in run if path not in asked],
        "new": [path for path in asked if path not in run],
    }
    return "; ".join(f"{what}: {', '.join(sorted(paths))}" for what, paths in found.items() if paths)


def _kept(asked: LoadedRecipe, *, run: LoadedRecipe, written: str) -> list[Keys]:
    """The keys that no author wrote, and of which the defaults of the two releases differ."""
    own, now = settings_of(run.recipe), settings_of(asked.recipe)
    unwritten = [
        keys for keys in own if own[keys] != now.get(keys, own[keys]) and not asked.document.says(keys)
    ]
    if written:
        # Of two texts that one release reads, only what their author changed differs.
        before = settings_of(parse_recipe(written).recipe)
        return [keys for keys in unwritten if before.get(keys) == now[keys]]
    chosen = {keys[:-1] for keys in now if keys[-1] in _CHOICES and own.get(keys) != now[keys]}
    return [keys for keys in unwritten if not any(keys[:depth] in chosen for depth in range(len(keys)))]
