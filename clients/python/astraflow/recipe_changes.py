"""What of a recipe may change while its run goes on: what only the trainer reads, and the plug-ins of the data path.

The run keeps the recipe that it was created with; a trainer that is started with another one trains by that from its
next step on, and the dataflow server switches plug-ins at the end of a step. Refused is what fixes shapes, what is
sampled, who it is for, or what other processes read too: they would disagree. Called by the trainer, by the launcher
before it starts one, and by the dataflow server.

A release changes nothing: where no author wrote a value, a run keeps the one that it was created with, and a key that
its release did not know takes the default of this one. Both are said.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from astraflow import __version__
from astraflow.dataflow.v1 import run_pb2
from astraflow.errors import ConflictError, IncompatibleError, RecipeError
from astraflow.recipe import Recipe
from astraflow.recipe.document import Keys
from astraflow.recipe.file import CodeFile, LoadedRecipe, parse_recipe

__all__ = [
    "Resumed",
    "code_differences",
    "differences",
    "file_digests",
    "new_settings",
    "plugin_changes",
    "read_recipe_of",
    "resume",
    "settings_of",
    "trainer_changes",
]

_MAY_CHANGE = re.compile(
    r"(policies\.[^.]+\.)?trainer\.(tokens_per_microbatch|gradient_sync|checkpoint_every_steps|checkpoint_every_s"
    r"|keep_checkpoints|algorithm|optimizer|trackers)\b(?!\.(advantage|critic|kind|average)\b)"
)
_PLUGINS = re.compile(r"(policies\.[^.]+\.)?dataflow\.(curators|filters|selector|routes|batch_needs)\b")
_STEPS = re.compile(r"(run|policies\.[^.]+)\.steps")
_UNSET = "unset"
_CHOICES = ("kind", "preset")
"""Keys that decide which others there are beside them, or their defaults."""


def trainer_changes(old: Recipe, new: Recipe) -> list[str]:
    """Return the keys that differ, `key: old → new`, apart from numbers of steps.

    Raises ConflictError naming those that may not.
    """
    changes = differences(old, new)
    # 0 steps are another kind of run: one without a window for training.
    changed = {key: values for key, values in changes.items() if not _STEPS.fullmatch(key) or "0" in values}
    return _allowed(changed, _MAY_CHANGE, "what only its trainer reads")


def plugin_changes(old: Recipe, new: Recipe) -> list[str]:
    """Return the keys that differ, as `trainer_changes` does, where only plug-ins of the data path and routes may."""
    return _allowed(differences(old, new), _PLUGINS, "curators, filters, selector, routes and batch_needs")


def settings_of(recipe: Recipe) -> dict[tuple[str, ...], str]:
    """Return every value of a resolved recipe that is set and no section, as JSON, by its keys."""
    return dict(_leaves(recipe.model_dump(mode="json"), ()))


def differences(old: Recipe, new: Recipe) -> dict[str, tuple[str, str]]:
    """Return the keys in which two recipes differ, with both values as JSON, or `unset`."""
    before, after = settings_of(old), settings_of(new)
    values = {".".join(keys): (before.get(keys, _UNSET), after.get(keys, _UNSET)) for keys in before | after}
    return {key: (was, now) for key, (was, now) in values.items() if was != now}


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


def _allowed(changed: Mapping[str, tuple[str, str]], may: re.Pattern[str], what: str) -> list[str]:
    shown = {key: f"{key}: {was} → {now}" for key, (was, now) in changed.items()}
    if fixed := [text for key, text in shown.items() if not may.match(key)]:
        raise ConflictError(
            f"a run keeps its recipe but for {what}; this may not change: {'; '.join(fixed)}. Put it back, or start "
            "another run"
        )
    return list(shown.values())


def _leaves(value: Any, keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:  # noqa: ANN401 - JSON
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, (*keys, name))
    elif value is not None:
        yield keys, json.dumps(value)


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
