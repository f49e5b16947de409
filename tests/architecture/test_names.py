"""Where things are found: module names say what they hold, tests stand where their modules stand."""

import ast
import re
from pathlib import Path

from support.source_tree import CLIENT_ROOT, REPOSITORY, SERVICES, recipe_modules, source_modules

VAGUE = {"common", "helper", "helpers", "manager", "managers", "misc", "util", "utils", "v2", "new", "old"}
TESTS = REPOSITORY / "tests"


def test_no_module_has_a_vague_name() -> None:
    vague = [module.name for module in source_modules() if VAGUE & words(module.path)]
    assert not vague, f"name what these hold instead: {vague}"


def test_every_module_says_what_it_is() -> None:
    written = [*source_modules(), *recipe_modules()]
    silent = [module.name for module in written if not ast.get_docstring(module.tree)]
    assert not silent, f"open these with what they own, the invariant they keep and who calls them: {silent}"


def test_every_unit_test_mirrors_a_module() -> None:
    tests = [path.relative_to(TESTS / "unit") for path in (TESTS / "unit").rglob("test_*.py")]
    lost = [str(test) for test in tests if not mirrored(test)]
    assert not lost, f"no module of that name exists beside these tests' roots: {lost}"


def test_the_mirror_rule_sees_a_test_without_a_module() -> None:
    assert mirrored(Path("astraflow/test_errors.py"))
    assert mirrored(Path("astraflow/test_errors_from_status.py"))
    assert not mirrored(Path("astraflow/test_nothing_of_that_name.py"))
    assert not mirrored(Path("astraflow_nowhere/test_errors.py"))


def test_test_folders_are_not_packages() -> None:
    markers = [str(path.relative_to(REPOSITORY)) for path in TESTS.rglob("__init__.py")]
    assert not markers, f"importlib mode needs no package markers, remove: {markers}"


def words(path: Path) -> set[str]:
    """The words of a module's name and of its folders inside the root."""
    return set(re.split(r"[_/.]", path.relative_to(REPOSITORY).with_suffix("").as_posix()))


def mirrored(test: Path) -> bool:
    """Whether `<root>/<folders>/test_<module>[_<aspect>].py` has its module, or its recipe folder."""
    subject = test.stem.removeprefix("test_")
    root, folders = test.parts[0], test.parts[1:-1]
    if root == "recipes":
        recipes = (REPOSITORY / "recipes" / Path(*folders)).glob("*")
        return any(found(subject, recipe.name.replace("-", "_")) for recipe in recipes)
    folder = ((CLIENT_ROOT if root == "astraflow" else SERVICES) / root).joinpath(*folders)
    modules = [path.stem.lstrip("_") for path in folder.glob("*") if path.suffix in ("", ".py")]
    return any(found(subject, name) for name in modules)


def found(subject: str, name: str) -> bool:
    """Whether a test subject is `name` itself or one aspect of it."""
    return bool(name) and f"{subject}_".startswith(f"{name}_")
