"""One distribution whose roots, extras and pins agree with each other and with the tree."""

import re
import tomllib
from typing import Any

from packaging.requirements import Requirement

import astraflow
from support.source_tree import REPOSITORY, roots

PYPROJECT: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = PYPROJECT["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def test_the_wheel_holds_exactly_the_roots_of_the_tree() -> None:
    packaged = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert sorted(packaged) == sorted(path.relative_to(REPOSITORY).as_posix() for path in roots().values())


def test_import_contracts_know_every_root() -> None:
    assert sorted(PYPROJECT["tool"]["importlinter"]["root_packages"]) == sorted(roots())


def test_every_root_ships_its_types() -> None:
    assert [name for name, folder in roots().items() if not (folder / "py.typed").exists()] == []


def test_torch_is_pinned_and_only_where_weights_are_computed() -> None:
    pins = {(extra, line) for extra, lines in EXTRAS.items() for line in lines if line.startswith("torch")}
    assert pins == {("trainer", "torch==2.13.0"), ("engine", "torch==2.13.0")}


def test_roles_agree_on_a_requirement_they_share() -> None:
    seen: dict[str, set[str]] = {}
    for line in (line for lines in EXTRAS.values() for line in lines):
        if not line.startswith("astraflow["):  # extras of our own build on each other
            seen.setdefault(Requirement(line).name, set()).add(line)
    assert {name: lines for name, lines in seen.items() if len(lines) > 1} == {}


def test_every_direct_dependency_is_pinned_once_and_nothing_else() -> None:
    declared = [PROJECT["dependencies"], *EXTRAS.values()]
    direct = {Requirement(line).name for lines in declared for line in lines}
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line[0] != "#"]
    assert all(re.fullmatch(r"==[\w.]+", str(pin.specifier)) for pin in pins)
    assert sorted(pin.name for pin in pins) == sorted(direct - {"astraflow"})


def test_the_version_is_written_once() -> None:
    assert "version" in PROJECT["dynamic"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", astraflow.__version__)


def test_the_readme_is_the_description_of_the_distribution() -> None:
    assert PROJECT.get("readme") == ("README.md" if (REPOSITORY / "README.md").exists() else None)
