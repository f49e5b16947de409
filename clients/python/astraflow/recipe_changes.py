"""What of a recipe may change while its run goes on: what only the trainer reads, and the plug-ins of the data path.

The run keeps the recipe that it was created with; a trainer that is started with another one trains by that from its
next step on, and the dataflow server switches plug-ins at the end of a step. Refused is what fixes shapes, what is
sampled, who it is for, or what other processes read too: they would disagree. Called by the trainer, by the launcher
before it starts one, and by the dataflow server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from astraflow.errors import ConflictError

if TYPE_CHECKING:
    from astraflow.recipe.settings import Recipe

__all__ = ["differences", "plugin_changes", "settings_of", "trainer_changes"]

_MAY_CHANGE = re.compile(
    r"(policies\.[^.]+\.)?trainer\.(tokens_per_microbatch|gradient_sync|checkpoint_every_steps|checkpoint_every_s"
    r"|keep_checkpoints|algorithm|optimizer|trackers)\b(?!\.(advantage|critic|kind|average)\b)"
)
_PLUGINS = re.compile(r"(policies\.[^.]+\.)?dataflow\.(curators|filters|selector|routes|batch_needs)\b")
_STEPS = re.compile(r"(run|policies\.[^.]+)\.steps")
_UNSET = "unset"


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
