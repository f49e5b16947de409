"""Pages do not promise what is not there: commands, options, make targets and sections that they name exist.

That relative links lead to files is checked with the tree (`test_tree.py`).
"""

import importlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from astraflow import cli
from astraflow.commands.waits import RANKS
from support.source_tree import REPOSITORY, tracked_files

PAGES = [path for path in tracked_files() if path.suffix == ".md"]
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.M | re.S)
INLINE = re.compile(r"`([^`\n]+)`")
COMMAND = re.compile(
    r"(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\S*/)?(astraflow|make) ([^\"].*)"
)  # an import of Go is quoted
SECTION_LINK = re.compile(r"\]\(([^)#\s:]*)#([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.M)
WIDTH = 120
GENERATED = ("docs/contracts.md", "docs/results")


@dataclass(frozen=True)
class Command:
    """A command line that a page shows."""

    page: str
    tool: str
    words: tuple[str, ...]


def commands() -> list[Command]:
    return [found for page in PAGES for found in commands_of(page.name, page.read_text())]


def commands_of(page: str, text: str) -> Iterator[Command]:
    """Command lines in the fenced blocks and in the inline code of a page."""
    blocks = FENCE.findall(text)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    for line in lines + INLINE.findall(FENCE.sub("", text)):
        found = COMMAND.fullmatch(line)
        if found and " = " not in line:
            yield Command(page, found[1], tuple(shlex.split(found[2], comments=True)))


def complaint(command: Command) -> str:
    """What is wrong with a command line, or nothing."""
    return wrong_target(command) if command.tool == "make" else wrong_words(command.words)


def wrong_target(command: Command) -> str:
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.M))
    named = [word for word in command.words if "=" not in word]
    return "".join(f"no target {word!r}" for word in named if word not in targets)


def wrong_words(words: tuple[str, ...]) -> str:
    """Follows subcommands as long as there are any, then compares options."""
    if words[0].startswith("-"):
        return unknown_options(words, typer.main.get_command(cli.app))
    if words[0] not in cli.COMMANDS:
        return f"no command {words[0]!r}"
    command, rest = walked(words)
    if hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        return f"no command {words[0]} {rest[0]!r}"
    return unknown_options(rest, command)


def walked(words: tuple[str, ...]) -> tuple[Any, tuple[str, ...]]:
    """The command that a command line names, or its group if it names none of that, and the words that are left."""
    command: Any = typer.main.get_command(importlib.import_module(cli.COMMANDS[words[0]].module).app)
    if words[1:] and words[1] in getattr(command, "commands", ()):
        return command.commands[words[1]], words[2:]
    return command, words[1:]


def unknown_options(words: tuple[str, ...], command: Any) -> str:
    known = {option for parameter in command.params for option in parameter.opts} | {"--help", "-h"}
    given = [word.partition("=")[0] for word in words if word.startswith("-")]
    return ", ".join(f"no option {option}" for option in given if option not in known)


def test_every_command_that_a_page_shows_exists() -> None:
    assert {command.tool for command in commands()} == {"astraflow", "make"}
    assert [(command, complaint(command)) for command in commands() if complaint(command)] == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("astraflow dev recipes/quickstart --nodes 2", ""),
        ("$ astraflow recipe check my-recipe --set run.steps=3  # a comment", ""),
        ("astraflow --version", ""),
        ("astraflow dve", "no command 'dve'"),
        ("astraflow recipe chek x", "no command recipe 'chek'"),
        ("astraflow dev --nodez=2", "no option --nodez"),
        ("astraflow raas -x", "no option -x"),
        ("make test T=tests/unit", ""),
        ("make tset", "no target 'tset'"),
    ],
)
def test_a_wrong_command_is_seen(line: str, expected: str) -> None:
    for text in (f"```sh\n{line}\n```\n", f"Run `{line}` now."):
        (found,) = commands_of("page", text)
        assert complaint(found) == expected


def test_prose_is_not_wider_than_the_house_allows() -> None:
    texts = {str(page.relative_to(REPOSITORY)): page.read_text() for page in PAGES}
    written = {name: text for name, text in texts.items() if not name.startswith(GENERATED)}
    wide = [f"{name}: {line[:60]}…" for name, text in written.items() for line in wide_lines(text)]
    assert not wide, f"wrap these lines at {WIDTH} characters: {wide}"


def wide_lines(text: str) -> list[str]:
    """Lines over the width, without fenced blocks and tables."""
    lines = FENCE.sub("", text).splitlines()
    return [line for line in lines if len(line) > WIDTH and not line.startswith("|")]


def test_a_wide_line_is_seen() -> None:
    wide = "word " * 25
    assert wide_lines(f"# Page\n\n{wide}\n\n| {wide} |\n\n```\n{wide}\n```\n") == [wide]


def test_every_section_that_a_link_names_exists() -> None:
    broken = [
        f"{page.relative_to(REPOSITORY)} -> {target}#{section}"
        for page in PAGES
        for target, section in SECTION_LINK.findall(page.read_text())
        if section not in sections(page.parent / target if target else page)
    ]
    assert broken == []


def sections(page: Path) -> set[str]:
    """The anchors of a page's headings, as forges make them."""
    headings = HEADING.findall(FENCE.sub("", page.read_text())) if page.suffix == ".md" else []
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_command_of_the_debugging_page_is_accepted_by_the_real_command_line() -> None:
    page = REPOSITORY / "docs" / "debugging.md"
    shown = [found for found in commands_of(page.name, page.read_text()) if found.tool == "astraflow"]
    named = {found.words[0] for found in shown}
    assert named >= {"status", "why", "trace", "support-bundle", "nodes", "dead-letters"}
    for found in shown:
        parse(found.words)


def parse(words: tuple[str, ...]) -> None:
    """Parses a command line as running it would, without running it. Raises the usage error."""
    command, rest = walked(words)
    command.make_context(words[0], list(rest))


def test_a_command_line_that_would_be_refused_is_seen() -> None:
    for line in ("trace", "dead-letters list --limit many", "status --watch extra"):
        with pytest.raises(Exception, match=r"(?i)missing parameter|a valid integer|unexpected extra"):
            parse(tuple(line.split()))


def test_every_wait_that_the_server_names_has_its_rank() -> None:
    server = REPOSITORY / "services" / "astraflow_dataflow"
    rooms = ("rules/waits.py", "rules/redis_health.py", "status/service_waits.py")
    source = "".join((server / name).read_text() for name in rooms)
    reasons = set(re.findall(r'reason="(\w+)"|_lease\(\s*"(\w+)"|^    "(\w+)": [("]', source, re.M))
    plugins = {f"{kind}_failed" for kind in ("curator", "filter", "selector")}
    named = {name for found in reasons for name in found if name} - {"curator", "filter"}
    by_clients = {reason for reason in RANKS if reason.startswith("server_")}
    assert sorted(named | plugins | by_clients) == sorted(RANKS), (
        "add it to astraflow.commands.waits and docs/debugging.md"
    )
