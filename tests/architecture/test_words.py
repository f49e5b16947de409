"""The words of the house: invented ones have a plain word, which product source and pages use instead.

`docs/glossary.md` is the page of terms. A reader who knows another system of the field must be able to read a log line
or a page without it.
"""

import re
from itertools import product

import pytest

from support.source_tree import REPOSITORY, tracked_files

INSTEAD = {
    r"\btold_\w+|_told\b": "sent_…, requested_…, announced_…",
    r"\b(?:is|are|was|were|been|being) told\b(?! apart)": "announced, sent, notified, reported",
    r"\blet_go\b|\blets go\b": "release, release_policy",
    r"leash": "parent, die_with_parent",
    r"[Cc]onductor": "run loop",
    r"\bPlugged\b": "the name of the plug-in",
    r"\bin passing\b": "if unheld",
    r"\bwithout a word\b": "exited without reporting",
    r"\bdrips\b": "slow connections are aborted and retried",
    r"\bways\b|\b(?:other|another|cheapest) way\b": "path, paths",
    r"\bled by\b|\bled_\w+": "on the first rank",
    r"\bheard of\b": "has called, sends heartbeats",
    r"\blast words\b": "the end of its log, its last message",
    r"\bat the door\b": "on arrival",
    r"\bright (?:sums?|answers?)\b": "correct answers",
    r"\bnam(?:e|es|ing) remed(?:y|ies)\b": "suggest fixes",
    r"\bsen[dt]s? home\b": "drain",
    r"\bgone since\b|\bwaits since\b": "gone for, has waited",
    r"\bWorkTurns?\b|\blanes_of\b": "what they are",
}
SOURCE = {".py", ".lua", ".proto", ".c"}
# Generated, or about what was called otherwise once.
EXEMPT = ("CHANGELOG.md", "docs/contracts.md", "docs/results/", "constraints.txt")


def texts() -> list[tuple[str, str]]:
    """(name, text) of hand-written product source, contracts and pages."""
    found = []
    for path in tracked_files():
        name = path.relative_to(REPOSITORY).as_posix()
        is_source = path.suffix in SOURCE and not name.startswith("tests/") and "_pb2" not in name
        if (is_source or path.suffix == ".md") and not name.startswith(EXEMPT):
            found.append((name, path.read_text()))
    return found


@pytest.mark.parametrize("pattern", INSTEAD)
def test_invented_words_are_not_used(pattern: str) -> None:
    found = [(name, hit[0]) for name, text in texts() for hit in re.finditer(pattern, text)]
    assert not found, f"write {INSTEAD[pattern]!r} instead of {found}"


INVENTED = "told_to_drain", "nodes are told of it", "def let_go(self)", "in passing", "each of its ways"
PLAIN = "sections are told apart by `kind`", "the same way", "always", "a path to the version", "its parent"


@pytest.mark.parametrize(("line", "is_invented"), [*product(INVENTED, [True]), *product(PLAIN, [False])])
def test_an_invented_word_is_seen_and_plain_ones_are_not(line: str, is_invented: bool) -> None:
    assert any(re.search(pattern, line) for pattern in INSTEAD) == is_invented
