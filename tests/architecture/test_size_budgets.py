"""Hard limits on size: beyond them a module or a function is doing two things and is split, not excused."""

import ast

from support.source_tree import REPOSITORY, SERVICES, modules, recipe_modules, source_modules

MODULE_LINES = 600
FUNCTION_LINES = 80
CLASS_LINES = 300
KIT_LINES = 1_800
RECIPE_LINES = 150


def test_no_module_is_longer_than_its_budget() -> None:
    long = {
        module.name: lines(module.source)
        for module in source_modules()
        if lines(module.source) > MODULE_LINES
    }
    assert not long, f"split these modules, the limit is {MODULE_LINES} lines: {long}"


def test_no_function_is_longer_than_its_budget() -> None:
    long = {
        f"{module.name}:{function.lineno} {function.name}": length(function)
        for module in [*source_modules(), *recipe_modules()]
        for function in module.functions()
        if length(function) > FUNCTION_LINES
    }
    assert not long, f"split these functions, the limit is {FUNCTION_LINES} lines: {long}"


def test_no_class_is_longer_than_its_budget() -> None:
    long = {
        f"{module.name}:{node.lineno} {node.name}": length(node)
        for module in source_modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and length(node) > CLASS_LINES
    }
    assert not long, f"split these classes, the limit is {CLASS_LINES} lines: {long}"


def test_the_kit_stays_small() -> None:
    code = sum(code_lines(module.source) for module in modules(SERVICES / "astraflow_kit"))
    assert code <= KIT_LINES, f"astraflow_kit has {code} lines of code, the limit is {KIT_LINES}"


def test_recipes_stay_small() -> None:
    long = {
        module.name: lines(module.source)
        for module in recipe_modules()
        if lines(module.source) > RECIPE_LINES
    }
    yaml = {
        str(path.relative_to(REPOSITORY)): lines(path.read_text())
        for path in (REPOSITORY / "recipes").glob("*/recipe.yaml")
        if lines(path.read_text()) > 60
    }
    assert not long | yaml, (
        f"a recipe is {RECIPE_LINES} lines of Python and 60 of YAML at most: {long | yaml}"
    )


def lines(text: str) -> int:
    """Lines of a text."""
    return len(text.splitlines())


def code_lines(text: str) -> int:
    """Lines that are neither blank nor only a comment."""
    stripped = (line.strip() for line in text.splitlines())
    return sum(1 for line in stripped if line and not line.startswith("#"))


def length(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    """Lines from the `def` or `class` line to the last one."""
    return (node.end_lineno or node.lineno) - node.lineno + 1
