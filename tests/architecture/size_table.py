"""Prints how many code lines each room has: `python tests/architecture/size_table.py`.

A code line holds code: blank lines, comments and docstrings do not count, so that saying more about the code
costs nothing and writing it denser gains nothing that the formatter does not take back. Generated contracts are
left out. `test_size_budgets.py` holds the totals to their budgets.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.source_tree import REPOSITORY, Module, modules, recipe_modules, roots

_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(module: Module) -> int:
    """Number of lines of a module that hold code."""
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.source).readline):
        if token.type not in _NO_CODE:
            held.update(range(token.start[0], token.end[0] + 1))
    return len(held - _docstring_lines(module.tree))


def _docstring_lines(tree: ast.Module) -> set[int]:
    """Lines of every string that stands as a statement: docstrings of modules, classes, functions and fields."""
    strings = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
    return {line for node in strings for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def product_modules() -> list[Module]:
    """What a user runs: every root but the benchmarks."""
    return [
        module for name, folder in roots().items() if name != "astraflow_bench" for module in modules(folder)
    ]


def test_modules() -> list[Module]:
    """Everything under tests/."""
    return modules(REPOSITORY / "tests")


def by_room(listed: Iterable[Module]) -> dict[str, list[Module]]:
    """Modules by the folder they lie in."""
    rooms: dict[str, list[Module]] = defaultdict(list)
    for module in listed:
        rooms[module.path.parent.relative_to(REPOSITORY).as_posix()].append(module)
    return dict(sorted(rooms.items()))


def main() -> None:
    """Print one line per room, then the totals."""
    everything = [module for folder in roots().values() for module in modules(folder)] + recipe_modules()
    out = sys.stdout
    out.write(f"{'room':52} {'modules':>7} {'lines':>6} {'median':>6} {'longest':>7}\n")
    for room, held in by_room(everything).items():
        sizes = [code_lines(module) for module in held]
        out.write(f"{room:52} {len(held):7} {sum(sizes):6} {median(sizes):6.0f} {max(sizes):7}\n")
    product = [code_lines(module) for module in product_modules()]
    out.write(
        f"\nproduct (without benchmarks and recipes): {sum(product)} code lines, median {median(product):.0f}\n"
    )
    out.write(f"tests: {sum(code_lines(module) for module in test_modules())} code lines\n")


if __name__ == "__main__":
    main()
