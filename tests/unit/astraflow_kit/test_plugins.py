"""Plug-ins: found, checked against their Protocol, refused with the remedy."""

from pathlib import Path
from typing import Protocol

import pytest

from astraflow import plugins as public
from astraflow.errors import PluginError
from astraflow_kit import plugins
from astraflow_kit.plugins import load, mismatch

_RECIPE = '''
"""A recipe's own code."""
from dataclasses import dataclass

@dataclass
class Answer:
    value: int

class Exact:
    def __call__(self, task, completion):
        return float(completion == "4")

def exact(task, completion):
    return 1.0

def narrow(task):
    return 1.0

async def late(task, completion):
    return 1.0

class Solve:
    async def run(self, task, policies):
        return None

class Blocking:
    def run(self, task, policies):
        return None

class Empty:
    run = None
'''


@pytest.fixture
def recipe_dir(tmp_path: Path) -> Path:
    (tmp_path / "recipe.py").write_text(_RECIPE)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "protocol"), [("Exact", public.Reward), ("exact", public.Reward), ("Solve", public.Workflow)]
)
def test_a_fitting_class_or_function_is_loaded(recipe_dir: Path, name: str, protocol: type) -> None:
    found = load(f"recipe:{name}", protocol=protocol, recipe_dir=recipe_dir)
    assert getattr(found, "__name__", None) == name


@pytest.mark.parametrize(
    ("name", "protocol", "complaint"),
    [
        ("narrow", public.Reward, r"is not a Reward: its `__call__` cannot be called as `def __call__\(task"),
        ("late", public.Reward, "its `__call__` is async"),
        ("Blocking", public.Workflow, "its `run` is not async; define `async def run"),
        ("Exact", public.Workflow, "it lacks `run`; define `async def run"),
        ("Empty", public.Workflow, "it lacks `run`"),
        ("Answer", public.Reward, "it lacks `__call__`"),
    ],
)
def test_a_mismatch_names_the_member_and_the_form(
    recipe_dir: Path, name: str, protocol: type, complaint: str
) -> None:
    with pytest.raises(PluginError, match=complaint):
        load(f"recipe:{name}", protocol=protocol, recipe_dir=recipe_dir)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("recipe", "is not `module.path:Name`"),
        (":Exact", "is not `module.path:Name`"),
        ("recipe:not a name", "is not `module.path:Name`"),
        ("recipe:Exat", "has no 'Exat'. Did you mean 'Exact'"),
        ("no_such_package.x:Y", "no module named 'no_such_package'; install"),
        ("json:loads", r"is not a Workflow: it lacks `run`"),
    ],
)
def test_what_cannot_be_found_is_refused_with_the_remedy(recipe_dir: Path, spec: str, complaint: str) -> None:
    with pytest.raises(PluginError, match=complaint):
        load(spec, protocol=public.Workflow, recipe_dir=recipe_dir)


@pytest.mark.parametrize("folder", [None, "empty"])
def test_a_recipe_without_code_says_so(tmp_path: Path, folder: str | None) -> None:
    with pytest.raises(PluginError, match=r"needs a recipe\.py beside the recipe"):
        load("recipe:X", protocol=public.Reward, recipe_dir=tmp_path / folder if folder else None)


def test_an_import_that_raises_names_file_line_and_cause_and_may_be_fixed(tmp_path: Path) -> None:
    path = tmp_path / "recipe.py"
    path.write_text("x = 1\nraise ValueError('bad table')\n")
    with pytest.raises(PluginError, match=r"recipe\.py:2: ValueError: bad table"):
        load("recipe:X", protocol=public.Reward, recipe_dir=tmp_path)
    path.write_text(_RECIPE)
    assert load("recipe:Exact", protocol=public.Reward, recipe_dir=tmp_path)


def test_recipe_code_runs_once_per_content(recipe_dir: Path) -> None:
    first = load("recipe:Exact", protocol=public.Reward, recipe_dir=recipe_dir)
    assert load("recipe:Exact", protocol=public.Reward, recipe_dir=recipe_dir) is first
    (recipe_dir / "recipe.py").write_text(_RECIPE + "\n# changed\n")
    assert load("recipe:Exact", protocol=public.Reward, recipe_dir=recipe_dir) is not first


def test_an_installed_module_is_loaded_by_its_path() -> None:
    assert load("astraflow_kit.plugins:load", protocol=_Anything) is plugins.load


class _Anything(Protocol):
    """No members."""


class _Named(Protocol):
    """A data member."""

    name: str


def test_a_data_member_may_be_declared_or_set() -> None:
    class Declared:
        name: str

    class Missing:
        pass

    holder = Missing()
    assert mismatch(Declared, protocol=_Named) is None
    assert "lacks the attribute `name`" in (mismatch(Missing, protocol=_Named) or "")
    holder.name = "x"  # type: ignore[attr-defined]
    assert mismatch(holder, protocol=_Named) is None


def test_static_and_class_methods_and_objects_fit() -> None:
    class Static:
        @staticmethod
        async def run(task: object, policies: object) -> None: ...

    class Klass:
        @classmethod
        async def run(cls, task: object, policies: object) -> None: ...

    for fit in (Static, Klass, Static(), Klass()):
        assert mismatch(fit, protocol=public.Workflow) is None
