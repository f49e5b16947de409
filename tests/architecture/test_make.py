"""The first thing a stranger types: `make` explains itself, and says in one line what the machine lacks."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from support.source_tree import REPOSITORY

REMEDY = "sudo apt-get install -y python3 python3-venv make git"
WORK = ["run", "test", "unit", "check", "soak", "study"]
UPKEEP = ["proto", "breaking", "lint", "types", "clean", "help"]


def make(target: str, *, folder: Path, path: str) -> subprocess.CompletedProcess[str]:
    command, environment = [str(shutil.which("make")), target], {"PATH": path, "HOME": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone beside `bin`, all the tools of its machine."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(REPOSITORY / name, tmp_path)
    (tmp_path / "bin").mkdir()
    for tool in ("cat", "cksum", "cut", "git"):
        (tmp_path / "bin" / tool).symlink_to(str(shutil.which(tool)))
    return tmp_path


def test_help_lists_every_target() -> None:
    listed = make("help", folder=REPOSITORY, path=os.environ["PATH"]).stdout
    assert [target for target in WORK + UPKEEP if f"  make {target} " not in listed] == []


@pytest.mark.parametrize("target", ["run", "test"])
def test_a_machine_without_python_gets_the_one_line(clone: Path, target: str) -> None:
    finished = make(target, folder=clone, path=str(clone / "bin"))
    assert finished.returncode != 0
    assert finished.stdout.splitlines() == [REMEDY]


@pytest.mark.parametrize(("python_says", "missing"), [(1, "python3-venv"), (0, "git")])
def test_a_machine_that_lacks_one_tool_gets_the_one_line(clone: Path, python_says: int, missing: str) -> None:
    (clone / "bin" / missing).unlink(missing_ok=True)
    stub = clone / "bin" / "python3"
    stub.write_text(f"#!/bin/sh\nexit {python_says}\n")
    stub.chmod(0o755)
    assert make("run", folder=clone, path=str(clone / "bin")).stdout.splitlines() == [REMEDY]
