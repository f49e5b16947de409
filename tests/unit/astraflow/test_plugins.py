"""What a recipe's own plug-ins can rely on: plain Python, checkable at start, values that do not change."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from typing import Any

import pytest

from astraflow import plugins

PROTOCOLS = {
    name: kind
    for name, kind in inspect.getmembers(plugins, inspect.isclass)
    if getattr(kind, "_is_protocol", False) and kind.__module__ == plugins.__name__
}
VALUES: dict[str, Any] = dict(inspect.getmembers(plugins, dataclasses.is_dataclass))


ERRORS = {
    name: kind
    for name, kind in inspect.getmembers(plugins, inspect.isclass)
    if issubclass(kind, Exception) and kind.__module__ == plugins.__name__
}


def test_every_public_name_is_a_protocol_a_value_an_error_or_the_state() -> None:
    assert sorted(plugins.__all__) == sorted({**PROTOCOLS, **VALUES, **ERRORS, "PluginState": None})


def test_importing_the_protocols_needs_only_the_standard_library() -> None:
    code = (
        "import sys; before = set(sys.modules); import astraflow.plugins; "
        "added = {name.split('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(added - set(sys.stdlib_module_names)))"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "['astraflow']"


@pytest.mark.parametrize("name", sorted(set(PROTOCOLS) - {"Policy"}))
def test_a_recipe_can_be_checked_against_every_plugin_protocol(name: str) -> None:
    class Nothing:
        pass

    assert not isinstance(Nothing(), PROTOCOLS[name])


@pytest.mark.parametrize("name", sorted(VALUES))
def test_values_cannot_be_changed_by_whoever_gets_them(name: str) -> None:
    assert VALUES[name].__dataclass_params__.frozen


def test_a_plain_class_and_a_plain_function_are_plugins() -> None:
    class Tasks:
        def train(self, index: int) -> plugins.TaskSpec | None:
            return None

        def heldout(self, index: int) -> plugins.TaskSpec | None:
            return None

    def keep(group: plugins.Group) -> bool:
        return True

    assert isinstance(Tasks(), plugins.Dataset)
    assert isinstance(keep, plugins.Filter)
