"""Contracts that break their callers are refused unless the contract version rises."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.source_tree import REPOSITORY

pytestmark = pytest.mark.slow

VERSION = "proto/astraflow/server/v1/server_info.proto"
RUN = "proto/astraflow/dataflow/v1/run.proto"


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-m", "contracts", "--allow-empty")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with the contracts of this one, landed on main."""
    folder = tmp_path / "repository"
    shutil.copytree(REPOSITORY / "proto", folder / "proto", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "buf.yaml", folder)
    git(folder.parent, "init", str(folder))
    commit(folder)
    return folder


def edit(folder: Path, file: str, before: str, after: str) -> None:
    text = (folder / file).read_text()
    assert before in text
    (folder / file).write_text(text.replace(before, after, 1))


def change(folder: Path, after: str) -> None:
    """Write something else where a field of a run stands."""
    edit(folder, RUN, "string identity = 8;", after)


ANOTHER_TYPE = "bytes identity = 8;"
ANOTHER_FIELD = "string identity = 8;\n  string region = 99;"


def check(folder: Path, status: int, *words: str) -> None:
    """The check ends with this status and says these words."""
    command = [sys.executable, str(folder / "proto" / "breaking.py")]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    missing = [word for word in words if word not in finished.stdout]
    assert (finished.returncode, finished.stderr, missing) == (status, "", []), finished.stdout


@pytest.mark.parametrize(
    ("after", "place"),
    [(ANOTHER_TYPE, "identity"), ("reserved 8;", '"8"'), ("string store_address = 8;", "identity")],
    ids=["another type", "no field", "another name in JSON"],
)
def test_a_break_is_refused_with_its_place_and_the_remedy(repository: Path, after: str, place: str) -> None:
    change(repository, after)
    check(repository, 1, RUN, place, "raise contract_version")


def test_a_break_that_is_declared_is_reported_and_accepted(repository: Path) -> None:
    change(repository, ANOTHER_TYPE)
    edit(repository, VERSION, "contract_version) = ", "contract_version) = 9")
    check(repository, 0, RUN, "declared, the contract version rose")


def test_an_addition_breaks_nobody(repository: Path) -> None:
    change(repository, ANOTHER_FIELD)
    check(repository, 0, "breaking: none since")


def test_on_main_the_commit_before_is_compared_with(repository: Path) -> None:
    change(repository, ANOTHER_TYPE)
    commit(repository)
    check(repository, 1, "against the commit before")


@pytest.mark.parametrize(
    ("before", "words"),
    [
        pytest.param(
            ["switch", "-c", "mine"], "the last commit shared with main", id="where a branch left main"
        ),
        pytest.param(["tag", "v0.1.0"], "against release v0.1.0", id="main, with its release"),
    ],
)
def test_commits_are_compared_with_what_was_shared(repository: Path, before: list[str], words: str) -> None:
    git(repository, *before)
    change(repository, ANOTHER_TYPE)
    commit(repository)
    commit(repository)
    check(repository, 1, words)


@pytest.mark.parametrize(
    ("depth", "words"),
    [([], "none since the commit before"), (["--depth", "1"], "nothing to compare with")],
)
def test_a_clone_compares_what_it_has(repository: Path, tmp_path: Path, depth: list[str], words: str) -> None:
    change(repository, ANOTHER_FIELD)
    commit(repository)
    git(tmp_path, "clone", *depth, f"file://{repository}", "clone")
    check(tmp_path / "clone", 0, words)
