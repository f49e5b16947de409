"""The repository stands on its own: no path of somebody's machine, no reference to what is not in it."""

import re
from pathlib import Path

import pytest

from support.source_tree import REPOSITORY, tracked_files

# Written as patterns so that this file does not match itself.
MACHINE = r"(?<![\w.~}/-])/(?:work|root|opt/pypi|opt/wheels|home/\w+|Users/\w+)(?:/|\b)"
PRIVATE = {
    "a path of one machine": re.compile(MACHINE),
    "a document outside the repository": re.compile(
        r"\bshared[/](?:reference|design|protocol|data)|\bbrief[.]md"
    ),
    "a private tool": re.compile(r"\bfarm[-]\w+|\bbefore[-]stop\b"),
    "a ticket number that only its author can open": re.compile(r"\b[Ii]ssue [#]?\d+\b"),
}
LINK = re.compile(r"\]\((?!https?://|mailto:|#)([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("what", sorted(PRIVATE))
def test_no_file_mentions(what: str) -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}:{number}: {hit[0]}"
        for path in texts()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if (hit := PRIVATE[what].search(line))
    ]
    assert not found, f"{what}: {found}"


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("a path of one machine", "see " + "/wo" + "rk/main"),
        ("a path of one machine", "'/ro" + "ot/.cache'"),
        ("a document outside the repository", "as in shar" + "ed/design.md"),
        ("a private tool", "run far" + "m-bench"),
        ("a ticket number that only its author can open", "see iss" + "ue 2"),
    ],
)
def test_each_private_word_is_seen(what: str, line: str) -> None:
    assert PRIVATE[what].search(line)


def test_ordinary_paths_are_not_private() -> None:
    lines = ["https://example.org/work/x", "data/root/", "clients/work/", "astraflow/home/x"]
    assert not [line for line in lines for pattern in PRIVATE.values() if pattern.search(line)]


def test_every_relative_link_leads_somewhere() -> None:
    broken = [
        f"{page.relative_to(REPOSITORY)} -> {target}"
        for page in texts()
        if page.suffix == ".md"
        for target in LINK.findall(page.read_text())
        if not (page.parent / target).exists()
    ]
    assert not broken, f"links to nothing: {broken}"


def texts() -> list[Path]:
    """Tracked text files, the licence aside."""
    binary = {".binpb", ".png", ".safetensors", ".bin", ".gz", ".zst"}
    return [path for path in tracked_files() if path.suffix not in binary and path.name != "LICENSE"]
