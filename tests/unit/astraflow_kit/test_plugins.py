"""Plug-ins: found, checked against their Protocol, refused with the remedy."""

import json
from pathlib import Path
from typing import Any, Protocol

import pytest

from astraflow import plugins as public
from astraflow.errors import PluginError
from astraflow.recipe.plugin_settings import PluginSettings
from astraflow_kit import plugins
from astraflow_kit.plugins import RecipeSource, load, make, mismatch, resolve

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

class Late:
    async def __call__(self, group):
        return True

class Solve:
    async def run(self, task, policies):
        return None

class Blocking:
    def run(self, task, policies):
        return None

class Empty:
    run = None

from pydantic import BaseModel, Field

class Edge(BaseModel):
    soft: bool = False

class Shape(BaseModel):
    width: int = Field(gt=0)
    depth: int = 2
    edge: Edge = Edge()

@dataclass
class Fields:
    limit: "int" = 3
    def __call__(self, task, completion):
        return float(self.limit)

class Modelled(Exact):
    def __init__(self, settings: Shape, *, seed: int):
        self.settings, self.seed = settings, seed

class Tolerant(Exact):
    def __init__(self, tolerance: "float", *, names: tuple[str, ...] = (), seed: int = -1):
        if tolerance > 9:
            raise ValueError("so wide a tolerance accepts anything")
        self.seen = (tolerance, names, seed)

class Open(Tolerant):
    def __init__(self, **settings):
        super().__init__(**settings)

class Unreadable(Exact):
    def __init__(self, limit: "Missing"):
        pass

def within(task, completion, *, tolerance: float = 0.0):
    return tolerance
'''


@pytest.fixture
def recipe_dir(tmp_path: Path) -> Path:
    (tmp_path / "recipe.py").write_text(_RECIPE)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "protocol"),
    [("Exact", public.Reward), ("exact", public.Reward), ("late", public.Reward), ("Solve", public.Workflow)],
)
def test_a_fitting_class_or_function_is_loaded(recipe_dir: Path, name: str, protocol: type) -> None:
    found = load(f"recipe:{name}", protocol=protocol, recipe_dir=recipe_dir)
    assert getattr(found, "__name__", None) == name


@pytest.mark.parametrize(
    ("name", "protocol", "complaint"),
    [
        ("narrow", public.Reward, r"is not a Reward: its `__call__` cannot be called as `def __call__\(task"),
        ("Late", public.Filter, "its `__call__` is async; define `def __call__"),
        ("Blocking", public.Workflow, "its `run` is not async; define `async def run"),
        ("Exact", public.Workflow, "it lacks `run`; define `async def run"),
        ("Empty", public.Workflow, "it lacks `run`"),
        ("Answer", public.Reward, "it lacks `__call__`"),
    ],
)
def test_a_mismatch_names_the_right_form(recipe_dir: Path, name: str, protocol: type, complaint: str) -> None:
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
    with pytest.raises(PluginError, match="--allow-recipe-code" if folder is None else r"needs a recipe\.py"):
        load("recipe:X", protocol=public.Reward, recipe_dir=tmp_path / folder if folder else None)


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("x = 1\nraise ValueError('bad table')\n", r"ValueError: bad table \(recipe\.py:2 in"),
        ("x = 1\nimport sys\nsys.exit(3)\n", r"SystemExit: 3 \(recipe\.py:3 in"),
        ("x = 1\ndef f(:\n", r"SyntaxError: invalid syntax \(recipe\.py, line 2\)$"),
    ],
    ids=["raises", "ends the process", "is no Python"],
)
def test_an_import_that_fails_names_file_line_and_cause_and_may_be_fixed(
    tmp_path: Path, code: str, complaint: str
) -> None:
    path = tmp_path / "recipe.py"
    path.write_text(code)
    with pytest.raises(PluginError, match=complaint):
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


def made(recipe_dir: Path, name: str, text: str = "", **settings: Any) -> Any:
    source = RecipeSource(name="recipe.yaml", text=text, folder=recipe_dir)
    return make(plugin(name, **settings), protocol=public.Reward, source=source, seed=7)


def plugin(name: str, **settings: Any) -> PluginSettings:
    return PluginSettings.model_validate({"use": f"recipe:{name}", "with": settings})


def test_a_class_is_made_with_its_settings_and_with_what_the_daemon_gives(recipe_dir: Path) -> None:
    assert made(recipe_dir, "Tolerant", tolerance=1, names=["a"]).seen == (1.0, ("a",), 7)
    assert made(recipe_dir, "Open", tolerance=1, names=["a"]).seen == (1, ["a"], 7)
    modelled = made(recipe_dir, "Modelled", width=3)
    assert (modelled.settings.width, modelled.settings.depth, modelled.seed) == (3, 2, 7)
    assert made(recipe_dir, "Exact")(None, "4") == 1.0


def test_a_function_gets_its_settings_at_every_call(recipe_dir: Path) -> None:
    assert made(recipe_dir, "within", tolerance=0.5)(None, "") == 0.5
    assert made(recipe_dir, "within")(None, "") == 0.0


@pytest.mark.parametrize(
    ("name", "settings", "complaint"),
    [
        ("Tolerant", {"tolerence": 1}, "has no setting 'tolerence'. Did you mean 'tolerance'"),
        ("Tolerant", {}, "needs the setting 'tolerance'; add it under `with`"),
        ("Tolerant", {"tolerance": "wide"}, r"with.tolerance: .* refuses 'wide': .* valid number"),
        ("Tolerant", {"tolerance": 1, "seed": 3}, "has no setting 'seed'"),
        ("Tolerant", {"tolerance": 1, "names": ["a", 2]}, r"with.names.1: .* refuses 2: .* valid string"),
        (
            "Tolerant",
            {"tolerance": 10},
            r"cannot be made with .*ValueError: so wide.*recipe\.py:\d+ in __init__",
        ),
        ("Modelled", {"widht": 1}, "has no setting 'widht'. Did you mean 'width'"),
        ("Modelled", {"width": 0}, r"with.width: .* refuses 0: .* greater than 0"),
        ("Modelled", {}, "needs the setting 'width'"),
        ("Unreadable", {"limit": 1}, "annotations of its settings cannot be used"),
        ("Exact", {"x": 1}, "has no setting 'x'; it takes none"),
        ("exact", {"x": 1}, "has no setting 'x'; it takes none"),
        ("Modelled", {"width": 1, "edge": {"with": 1}}, r"with\.edge\.with: .* has no setting 'with'$"),
        ("Fields", {"limit": "x"}, "refuses 'x'"),
        ("within", {"tolerance": None}, "refuses None"),
    ],
)
def test_settings_that_do_not_fit_are_refused_where_they_stand(
    recipe_dir: Path, name: str, settings: dict[str, Any], complaint: str
) -> None:
    text = f"raas:\n  reward:\n    use: recipe:{name}\n    with: {json.dumps(settings)}\n"
    with pytest.raises(PluginError, match=complaint) as refused:
        made(recipe_dir, name, text, **settings)
    line = 4 if "with." in refused.value.message.split(" ")[1] else 2
    assert refused.value.message.startswith(f"recipe.yaml:{line}: raas.reward")
    assert f"'recipe:{name}'" in refused.value.message


def test_settings_are_checked_without_making_anything(recipe_dir: Path) -> None:
    source = RecipeSource(folder=recipe_dir)
    _, settings = resolve(plugin("Tolerant", tolerance=10), protocol=public.Reward, source=source)
    assert settings == {"tolerance": 10.0}
