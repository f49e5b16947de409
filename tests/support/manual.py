"""The blocks of the manual's pages, and what the comment above each says of it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from support.source_tree import REPOSITORY, tracked_files

_BLOCK = re.compile(
    r"(?:^ *<!-- (run|tested|needs|file)(?:: ([^\n]+))? -->\n)?^ *```(\w*)[^\n]*\n(.*?)^ *```$", re.M | re.S
)
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
