"""Contracts that break their callers are refused unless the contract version rises."""

import shutil
import subprocess
import sys
from collections.abc import Callable
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


def change_a_type(folder: Path) -> None:
    edit(folder, RUN, "string store_uri = 4;", "bytes store_uri = 4;")


def remove_a_field(folder: Path) -> None:
    edit(folder, RUN, "string store_uri = 4;", "reserved 4;")


def rename_in_json(folder: Path) -> None:
    edit(folder, RUN, "string store_uri = 4;", "string store_address = 4;")


def add_a_field(folder: Path) -> None:
    edit(folder, RUN, "string store_uri = 4;", "string store_uri = 4;\n  string region = 99;")


def raise_the_version(folder: Path) -> None:
    edit(folder, VERSION, "contract_version) = ", "contract_version) = 9")


def breaking(folder: Path) -> tuple[int, str]:
    """Exit status and output of the check."""
    command = [sys.executable, str(folder / "proto" / "breaking.py")]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not finished.stderr
    return finished.returncode, finished.stdout


@pytest.mark.parametrize("change", [change_a_type, remove_a_field, rename_in_json])
def test_a_change_that_breaks_callers_is_refused_with_its_place_and_the_remedy(
    repository: Path, change: Callable[[Path], None]
) -> None:
    change(repository)
    status, said = breaking(repository)
    assert status == 1
    assert RUN in said
    assert "store_uri" in said or '"4"' in said
    assert "raise contract_version" in said


def test_a_break_that_is_declared_is_reported_and_accepted(repository: Path) -> None:
    change_a_type(repository)
    raise_the_version(repository)
    status, said = breaking(repository)
    assert status == 0
    assert RUN in said
    assert "declared, the contract version rose" in said


def test_an_addition_breaks_nobody(repository: Path) -> None:
    add_a_field(repository)
    status, said = breaking(repository)
    assert (status, "breaking: none since" in said) == (0, True), said


def test_on_main_the_commit_before_is_compared_with(repository: Path) -> None:
    change_a_type(repository)
    commit(repository)
    status, said = breaking(repository)
    assert (status, "against the commit before" in said) == (1, True), said


def test_a_branch_is_compared_with_where_it_left_main(repository: Path) -> None:
    git(repository, "switch", "-c", "mine")
    change_a_type(repository)
    commit(repository)
    commit(repository)
    status, said = breaking(repository)
    assert (status, "the last commit shared with main" in said) == (1, True), said


def test_a_release_counts_more_than_main(repository: Path) -> None:
    git(repository, "tag", "v0.1.0")
    change_a_type(repository)
    commit(repository)
    commit(repository)
    status, said = breaking(repository)
    assert (status, "against release v0.1.0" in said) == (1, True), said


@pytest.mark.parametrize("depth", [[], ["--depth", "1"]])
def test_a_clone_compares_with_what_it_has(repository: Path, tmp_path: Path, depth: list[str]) -> None:
    add_a_field(repository)
    commit(repository)
    git(tmp_path, "clone", *depth, f"file://{repository}", "clone")
    status, said = breaking(tmp_path / "clone")
    wanted = "nothing to compare with" if depth else "none since the commit before"
    assert (status, wanted in said) == (0, True), said
