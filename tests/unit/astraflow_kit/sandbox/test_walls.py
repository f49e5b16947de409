"""What a process within the walls can see and write."""

import subprocess
import sys
from pathlib import Path

import pytest

from astraflow.plugins import MissingCapability
from astraflow_kit.sandbox.budget import Budget
from astraflow_kit.sandbox.walls import Walls
from support.sandbox import CHANGES_THE_HOST, needs_bubblewrap

pytestmark = needs_bubblewrap
PYTHON = Path(sys.executable).resolve()
FILL = """
import os
def full(folder, size):
    try:
        for number in range(1000):
            with open(f"{folder}/{number}", "wb") as file: file.write(bytes(size))
    except OSError as error:
        return error.errno
print(full("/tmp", 0), full("/one", 10**5), full("/one/two", 1), full("/", 1), full("/usr", 1))
"""


def said(source: str, *, budget: Budget, **about: object) -> list[str]:
    walls = Walls(python=PYTHON, main="", code=(), **about)  # type: ignore[arg-type]
    argv = walls.command_line(budget, start=source)
    done = subprocess.run(argv, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    return done.stdout.split()


@pytest.mark.parametrize("is_machine", [False, True])
def test_all_writable_folders_share_the_files_and_bytes_of_the_budget(is_machine: bool) -> None:
    folders = ("/one/two", "/tmp", "/one")
    for budget in (Budget(disk_mb=1, files=5000), Budget(disk_mb=100, files=50)):
        found = said(FILL, budget=budget, is_machine=is_machine, writable=folders)
        assert found[1:] == ["28", "28", "30", "30"]  # no space left; read-only
        assert found[0] == ("28" if budget.files == 50 else "None")


@pytest.mark.parametrize("about", [{}, {"is_machine": True}, {"is_machine": True, "is_root_writable": True}])
def test_nothing_that_is_shared_with_the_host_can_be_changed_and_devices_work(about: dict[str, bool]) -> None:
    assert said(CHANGES_THE_HOST, budget=Budget(disk_mb=1), **about) == ["7"]


def test_an_interpreter_that_does_not_start_says_why_and_what_to_do(tmp_path: Path) -> None:
    walls = Walls(python=tmp_path / "bin" / "python", main="", code=())
    with pytest.raises(MissingCapability, match=r"bwrap cannot start .*python: .*install bubblewrap 0\.8"):
        walls.require(probe="")
