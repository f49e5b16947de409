"""The map of the house in `docs/architecture.md`: its room tables list what there is, its look-ups lead there."""

import ast
import re
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

from support.source_tree import REPOSITORY, tracked_files

PAGE = REPOSITORY / "docs" / "architecture.md"
SECTION = re.compile(r"^### [^\n]+?: (`[^\n]+)\n(.*?)(?=^##)", re.M | re.S)
LOOK_UP = re.compile(r"^\| (?P<question>.+\?) \| `(?P<path>[\w/.]+)`(?: `(?P<name>\w+)`)? \|$", re.M)


@cache
def rooms() -> dict[str, set[str]]:
    """Package → what the first column of its room table names: `folder/` or `module.py`."""
    text, found = PAGE.read_text(), dict[str, set[str]]()
    for packages, body in SECTION.findall(text.partition("## Rooms")[2]):
        cells = re.findall(r"^\| (`.+?) \|", body, re.M)
        names = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
        found |= dict.fromkeys(re.findall(r"`([^`]+)`", packages), names)
    return found


TABLE = PAGE.read_text().partition("## Look-ups")[2].partition("\n## ")[0]
LOOK_UPS = list(LOOK_UP.finditer(TABLE))


def folders(package: str) -> set[str]:
    """The folders with code right below a package."""
    code = [path for path in tracked_files() if path.suffix in (".py", ".pyi", ".lua", ".c")]
    root = REPOSITORY / package
    inside = [path.relative_to(root) for path in code if path.is_relative_to(root)]
    return {f"{path.parts[0]}/" for path in inside if len(path.parts) > 1}


def test_every_package_has_a_table() -> None:
    packages = {f"services/{path.name}/" for path in (REPOSITORY / "services").glob("astraflow_*")}
    assert set(rooms()) == packages | {"clients/python/astraflow/"}


@pytest.mark.parametrize("package", sorted(rooms()))
def test_room_tables_list_exactly_the_folders_that_exist(package: str) -> None:
    listed = {name for name in rooms()[package] if name.endswith("/")}
    assert listed == folders(package)


def test_modules_beside_the_rooms_exist() -> None:
    listed = {name for names in rooms().values() for name in names if not name.endswith("/")}
    existing = {path.name for package in rooms() for path in (REPOSITORY / package).glob("*.py")}
    assert listed <= existing


def test_there_are_enough_look_ups() -> None:
    assert len(LOOK_UPS) >= 20
    assert len(LOOK_UPS) == TABLE.count("\n| ") - 1, "a row is not `| question? | `path` `name` |`"


@pytest.mark.parametrize("row", LOOK_UPS, ids=lambda row: row["question"])
def test_a_look_up_resolves_by_the_room_tables(row: re.Match[str]) -> None:
    path, name = REPOSITORY / row["path"], row["name"]
    assert path.is_file()
    (package,) = [package for package in rooms() if row["path"].startswith(package)]
    room, _, rest = row["path"].removeprefix(package).partition("/")
    assert (f"{room}/" if rest else room) in rooms()[package]
    assert name is None or name in defined(path)


def defined(path: Path) -> set[str]:
    """Names of the functions, classes and constants that a module defines."""
    if path.suffix == ".lua":
        return set(re.findall(r"^(?:local function |function F\.)(\w+)", path.read_text(), re.M))
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    tree = ast.parse(path.read_text())
    names = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
    assigned = chain.from_iterable(node.targets for node in tree.body if isinstance(node, ast.Assign))
    return names | set(map(ast.unparse, assigned))
