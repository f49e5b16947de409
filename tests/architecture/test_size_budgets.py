"""Hard limits on size: beyond them a module or a function is doing two things and is split, not excused.

`python tests/architecture/size_table.py` prints the code lines of every room.
"""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from statistics import median

import pytest

from support.code_size import by_room, code_lines, code_lines_of, product_modules, suite_modules
from support.source_tree import REPOSITORY, SERVICES, modules, recipe_modules, roots, source_modules

MODULE_LINES = 605
Kind = type[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]
BUDGETS: dict[Kind, int] = {ast.FunctionDef: 50, ast.AsyncFunctionDef: 50, ast.ClassDef: 300}
KIT_LINES = 5_000
RECIPE_LINES = 150
PRODUCT_CODE_LINES = 62_500
TEST_CODE_LINES = 78_600
MEDIAN_MODULE = 140
ROOM_MODULES = 16
# Flat on purpose: one question each, and every module is found by its name.
FLAT = {"services/astraflow_kit", "services/astraflow_engine"}


def test_no_module_is_longer_than_its_budget() -> None:
    long = over(MODULE_LINES, {module.name: lines(module.source) for module in source_modules()})
    assert not long, f"split these modules, the limit is {MODULE_LINES} lines: {long}"


@pytest.mark.parametrize("kind", BUDGETS)
def test_no_definition_is_longer_than_its_budget(kind: Kind) -> None:
    definitions = {
        f"{module.name}:{node.lineno} {node.name}": length(node)
        for module in [*source_modules(), *recipe_modules()]
        for node in ast.walk(module.tree)
        if isinstance(node, kind)
    }
    assert definitions
    assert over(BUDGETS[kind], definitions) == {}, f"split these, the limit is {BUDGETS[kind]} lines"


def test_the_kit_stays_small() -> None:
    code = sum(written_lines(module.source) for module in modules(SERVICES / "astraflow_kit"))
    assert code <= KIT_LINES, f"astraflow_kit has {code} lines, the limit is {KIT_LINES}"


def test_recipes_stay_small() -> None:
    yaml = {str(path): lines(path.read_text()) for path in (REPOSITORY / "recipes").glob("*/*.yaml")}
    code = {module.name: lines(module.source) for module in recipe_modules()}
    long = over(RECIPE_LINES, code) | over(60, yaml)
    assert not long, f"a recipe is {RECIPE_LINES} lines of Python and 60 of YAML at most: {long}"


def test_the_product_stays_within_its_budget() -> None:
    total = sum(code_lines(module) for module in product_modules())
    assert total <= PRODUCT_CODE_LINES, f"{total} code lines; say it once, or let a library do it"


def test_the_tests_stay_within_their_budget() -> None:
    total = sum(code_lines(module) for module in suite_modules())
    assert total <= TEST_CODE_LINES, f"{total} code lines of tests; share fixtures, make tables of copies"


def test_the_median_module_is_short() -> None:
    assert median(code_lines(module) for module in product_modules()) <= MEDIAN_MODULE


def test_no_room_is_crowded() -> None:
    rooms = {room: len(held) for room, held in by_room(source_modules()).items() if room not in FLAT}
    crowded = over(ROOM_MODULES, rooms)
    assert not crowded, f"give these rooms of their own, the limit is {ROOM_MODULES} modules: {crowded}"


@pytest.mark.parametrize("root", sorted(roots()))
def test_a_class_name_means_one_thing_in_its_package(root: str) -> None:
    nodes = [node for module in modules(roots()[root]) for node in ast.walk(module.tree)]
    assert over(1, Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))) == {}


def test_the_table_of_rooms_prints() -> None:
    script = REPOSITORY / "tests" / "architecture" / "size_table.py"
    printed = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    assert "services/astraflow_dataflow/store" in printed
    assert "product (without benchmarks and recipes):" in printed


def test_only_code_counts() -> None:
    statement, function = "x = (\n    1,\n)\n", 'def f() -> int:\n    """Says."""\n    return x[0]\n'
    text = f'"""A page\nof words."""\n\n# why\n{statement}\n\n{function}'
    assert code_lines_of(text) == 5


def over(limit: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Those beyond a limit."""
    return {name: size for name, size in sizes.items() if size > limit}


def lines(text: str) -> int:
    """Lines of a text."""
    return len(text.splitlines())


def written_lines(text: str) -> int:
    """Lines that are neither blank nor only a comment."""
    stripped = (line.strip() for line in text.splitlines())
    return sum(1 for line in stripped if line and not line.startswith("#"))


def length(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    """Lines from the `def` or `class` line to the last one; of a command, those after its option declarations."""
    first = node.body[0].lineno if is_command(node) else node.lineno
    return (node.end_lineno or node.lineno) - first + 1


def is_command(node: ast.AST) -> bool:
    """Whether typer reads the signature of a function as options."""
    decorators = getattr(node, "decorator_list", [])
    return any(".command(" in ast.unparse(item) or ".callback(" in ast.unparse(item) for item in decorators)
