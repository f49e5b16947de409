"""The manual: generated pages are current, its navigation is whole, and each command is run by a test or needs more.

A block of commands (`sh`, `bash`, `console`) of README.md or docs/ stands below a comment that says which:
`<!-- run -->` or `<!-- run: OPTIONS -->`, `tests/e2e/test_manual.py` runs it, with options added to `astraflow dev`;
`<!-- tested: FILE … -->`, these tests run its commands; `<!-- needs: WHAT -->`, it needs hardware, another machine or a
person.
"""

import importlib.util
import re
from types import ModuleType
from typing import Any

import pytest
import typer

from astraflow.cli import COMMANDS as COMMANDS_BY_NAME
from support.manual import COMMANDS, PAGES, Block, blocks_of, commands_of, loose_commands
from support.source_tree import REPOSITORY


def complaint(block: Block) -> str:
    """What is wrong with the comment above a block, or nothing."""
    if not block.kind:
        return "say above it what runs it: <!-- run -->, <!-- tested: FILE --> or <!-- needs: WHAT -->"
    if block.kind == "needs" and not block.said:
        return "say what it needs"
    if block.kind != "tested":
        return ""
    files = [REPOSITORY / name for name in block.said.split()]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        return f"no test {', '.join(missing)}"
    tests = "".join(file.read_text() for file in files)
    words = re.findall(r"^\s*astraflow ([a-z-]+)", block.text, re.M)
    return "".join(
        f"no test of {block.said} says {word}" for word in words if word.rpartition("-")[2] not in tests
    )


def generator() -> ModuleType:
    """What `make manual` runs."""
    place = importlib.util.spec_from_file_location("docs_generate", REPOSITORY / "docs" / "generate.py")
    assert place is not None
    assert place.loader is not None
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    return module


def test_every_command_of_the_manual_is_run_or_says_what_it_needs() -> None:
    found = [(page, block) for page in PAGES for block in blocks_of(page.read_text())]
    shown = [(page, block) for page, block in found if block.language in COMMANDS]
    assert len(shown) > 20
    wrong = [(str(page.relative_to(REPOSITORY)), block.text[:60], complaint(block)) for page, block in shown]
    assert not [each for each in wrong if each[-1]]


def test_no_command_evades_its_comment() -> None:
    found = [(str(page.relative_to(REPOSITORY)), loose_commands(page.read_text())) for page in PAGES]
    assert [each for each in found if each[1]] == []
    assert loose_commands("Text\n\n    astraflow why\n\n```\nastraflow status\n```\n") == [
        "astraflow why",
        "astraflow status",
    ]


def mistake(words: list[str]) -> str:
    """What the command line would not understand, by names of commands and options, or nothing."""
    if words[0] not in COMMANDS_BY_NAME:
        return f"no command {words[0]}"
    command: Any = typer.main.get_command(importlib.import_module(COMMANDS_BY_NAME[words[0]].module).app)
    rest = words[1:]
    while hasattr(command, "commands"):
        name = next((word for word in rest if not word.startswith("-")), None)
        if name is None:
            return ""  # the group itself is spoken of
        if name not in command.commands:
            return f"no command {words[0]} {name}"
        rest.remove(name)
        command = command.commands[name]
    known = {
        "--help",
        *(name for option in command.params for name in (*option.opts, *option.secondary_opts)),
    }
    unknown = [word for word in rest if word.startswith("-") and word.partition("=")[0] not in known]
    return f"no option {', '.join(unknown)}" if unknown else ""


def test_every_command_that_is_spoken_of_is_there_with_its_options() -> None:
    said = {(page.name, *words) for page in PAGES for words in commands_of(page.read_text())}
    assert len(said) > 200
    assert [(*each, wrong) for each in sorted(said) if (wrong := mistake(list(each[1:])))] == []
    assert mistake(["status", "--server", "x"]) == "no option --server"
    assert mistake(["runs", "sell"]) == "no command runs sell"


def test_every_page_that_says_run_is_run() -> None:
    said = {
        str(page.relative_to(REPOSITORY))
        for page in PAGES
        if any(block.kind == "run" for block in blocks_of(page.read_text()))
    }
    runner = (REPOSITORY / "tests" / "e2e" / "test_manual.py").read_text()
    assert {page for page in said if f'"{page}"' not in runner} == set()


@pytest.mark.parametrize(
    ("comment", "said"),
    [
        ("", "say above it"),
        ("<!-- run -->", ""),
        ("<!-- run: --steps 1 -->", ""),
        ("<!-- needs: a GPU -->", ""),
        ("<!-- needs -->", "say what it needs"),
        ("<!-- tested: tests/e2e/test_dev.py -->", ""),
        ("<!-- tested: tests/e2e/test_nothing.py -->", "no test test_nothing.py"),
        ("<!-- tested: tests/architecture/test_make.py -->", "no test of"),
    ],
)
def test_a_block_without_its_comment_is_seen(comment: str, said: str) -> None:
    (block,) = blocks_of(f"Text\n\n{comment}\n```bash\nastraflow dev quickstart\n```\n")
    assert complaint(block).startswith(said)
    assert bool(complaint(block)) == bool(said)


def test_every_page_is_in_the_navigation() -> None:
    listed = (REPOSITORY / "mkdocs.yml").read_text()
    pages = [str(page.relative_to(REPOSITORY / "docs")) for page in PAGES if "docs" in page.parts]
    assert [page for page in pages if not re.search(rf"[:-] {re.escape(page)}$", listed, re.M)] == []


def test_generated_pages_are_current() -> None:
    stale = [
        name for name, text in generator().pages().items() if (REPOSITORY / "docs" / name).read_text() != text
    ]
    assert not stale, f"run `make manual`: {stale}"


def test_generated_pages_know_every_command_and_error_by_their_names() -> None:
    made = generator().pages()
    assert "### astraflow runs switch" in made["reference/commands.md"]
    assert "`--max-silence-s`" in made["reference/commands.md"]
    assert "| `FENCED` | `FAILED_PRECONDITION` | `FencedError` |" in made["reference/errors.md"]
    assert "| `max_staleness` | integer in 0…1024 | `2` |" in made["reference/recipe.md"]
    assert "(tasks/train-two-policies.md): Each policy has its own trainer" in made["llms.txt"]
    assert "do not edit" not in made["llms.txt"]
