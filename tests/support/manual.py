"""The blocks of the manual's pages, and what the comment above each says of it."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from support.source_tree import REPOSITORY, tracked_files

_BLOCK = re.compile(
    r"(?:^ *<!-- (run|tested|needs|file)(?:: ([^\n]+))? -->\n)?^ *```(\w*)[^\n]*\n(.*?)^ *```$", re.M | re.S
)
_FENCED = re.compile(r"^ *```.*?^ *```$", re.M | re.S)
_LOOSE = re.compile(r"^ {4,}(?:astraflow|docker|helm|kubectl|make|pip) .*$", re.M)
_INLINE = re.compile(r"`astraflow ([^`]+)`")
_LINE = re.compile(r"^ *(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?astraflow ([a-z][^\n]*)$", re.M)
COMMANDS = ("sh", "bash", "console")
PAGES = [
    path
    for path in tracked_files()
    if path.suffix == ".md" and path.relative_to(REPOSITORY).parts[0] in ("docs", "README.md")
]


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the comment above it."""

    kind: str
    """`run`, `tested`, `needs` or `file`; empty where there is no comment."""
    said: str
    language: str
    text: str


def blocks_of(text: str) -> Iterator[Block]:
    """All blocks of a page, in order."""
    for kind, said, language, shown in _BLOCK.findall(text):
        yield Block(kind, said, language, shown)


def loose_commands(text: str) -> list[str]:
    """Commands that stand in no block that says which it is: indented, or fenced without a language."""
    unnamed = [block.text for block in blocks_of(text) if not block.language]
    found = [line.strip() for line in _LOOSE.findall(_FENCED.sub("", text))]
    return found + [line for block in unnamed for line in block.splitlines() if line.startswith("astraflow ")]


def commands_of(text: str) -> list[list[str]]:
    """The words behind `astraflow` of every command of a page: in blocks of any kind and in sentences."""
    said = [*_LINE.findall(text), *_INLINE.findall(text.replace("\n", " "))]
    # Without comments, redirections and what goes on.
    plain = (re.sub(r"\s(#|[>|&]).*$", "", line).replace("…", "") for line in said)
    return [shlex.split(line) for line in plain]
