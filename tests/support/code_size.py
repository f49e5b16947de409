"""How large the hand-written source is: code lines per module and per room.

A code line holds code. Blank lines, comments and docstrings do not count: saying more about the code costs nothing, and
writing it denser gains nothing that the formatter does not take back. Generated contracts are left out.
"""

import ast
import io
import re
import subprocess
import tokenize
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain

from support.source_tree import REPOSITORY, Module, docstrings, modules, roots

_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(module: Module) -> int:
    """Number of lines of a module that hold code."""
    return code_lines_of(module.source)


def code_lines_of(text: str) -> int:
    """Number of lines of Python that hold code."""
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            held.update(range(token.start[0], token.end[0] + 1))
    return len(held - _docstring_lines(ast.parse(text)))


def _docstring_lines(tree: ast.Module) -> set[int]:
    lines = (range(node.lineno, (node.end_lineno or node.lineno) + 1) for node in docstrings(tree))
    return set(chain.from_iterable(lines))


_COMMENT = {"lua": re.compile(r"\s*--.*"), "": re.compile(r"\s*(//|/\*|\*).*")}
_LANGUAGES = {
    "Lua": ("*.lua",), "proto": ("*.proto",), "Go": ("*.go",), "TypeScript": ("*.ts", "*.mjs"), "C": ("*.c", "*.h"),
    "C++": ("*.cc", "clients/cpp/*.h"),
}  # fmt: skip
_NOT_PRODUCT = re.compile(r"/gen/|\.pb\.|astraflow_bench/|^tests/")


def other_languages() -> dict[str, int]:
    """Code lines that are written by hand in other languages than Python, by language; tests of clients count."""
    lines = dict.fromkeys(_LANGUAGES, 0)
    counted: set[str] = set()
    for language in reversed(_LANGUAGES):  # a header of C++ is no header of C
        listed = subprocess.run(
            ["git", "ls-files", *_LANGUAGES[language]],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=True,
        )
        for name in set(listed.stdout.split()) - counted:
            counted.add(name)
            if not _NOT_PRODUCT.search(name):
                lines[language] += _lines_without_comments(name)
    return lines


def _lines_without_comments(name: str) -> int:
    comment = _COMMENT.get(name.rpartition(".")[2], _COMMENT[""])
    text = (REPOSITORY / name).read_text()
    return sum(bool(line.strip()) and not comment.fullmatch(line) for line in text.splitlines())


def product_modules() -> list[Module]:
    """What a user runs: every root but the benchmarks."""
    folders = [folder for name, folder in roots().items() if name != "astraflow_bench"]
    return [module for folder in folders for module in modules(folder)]


def suite_modules() -> list[Module]:
    """Everything under tests/."""
    return modules(REPOSITORY / "tests")


def by_room(listed: Iterable[Module]) -> dict[str, list[Module]]:
    """Modules by the folder they lie in."""
    rooms: dict[str, list[Module]] = defaultdict(list)
    for module in listed:
        rooms[module.path.parent.relative_to(REPOSITORY).as_posix()].append(module)
    return dict(sorted(rooms.items()))
