"""A child that asked for it, or was started for it, dies with its parent, also when that is already gone."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from astraflow_kit.family import ending_with_us
from astraflow_kit.parent import dying_with_us, python
from support.hostile_folder import HOSTILE_STATUS, hostile_folder

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="uses prctl")

_CHILD = """
import os, sys, time
from astraflow_kit.parent import die_with_parent
if sys.argv[2] == "late":
    while os.getppid() == int(sys.argv[1]):
        time.sleep(0.01)
die_with_parent(int(sys.argv[1]))
os.write(1, f"armed {os.getpid()}\\n".encode())
time.sleep(600)
"""

_PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid()), sys.argv[2]])
os.write(1, f"parent {child.pid}\\n".encode())
if sys.argv[2] == "late":
    os._exit(0)
time.sleep(600)
"""


@contextmanager
def _family(mode: str) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """A parent that has a child, and the pipe to which both write: it ends when both are dead."""
    command = [sys.executable, "-c", _PARENT, _CHILD, mode]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as parent:
        assert parent.stdout is not None
        try:
            yield parent, parent.stdout
        finally:
            parent.kill()


def test_the_child_dies_when_its_parent_is_killed() -> None:
    with _family("early") as (parent, said):
        assert any(line.startswith(b"armed") for line in iter(said.readline, b""))
        parent.kill()
        said.read()


def test_a_child_armed_after_its_parent_died_ends_at_once() -> None:
    with _family("late") as (_, said):
        assert b"armed" not in said.read()


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_another_program_keeps_the_pid_it_was_started_under_and_its_arguments() -> None:
    command = dying_with_us("sh", "-c", 'echo "$$ $0 $1"; exit 3', "first", "two words")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        said, _ = process.communicate()
    assert (said, process.returncode) == (f"{process.pid} first two words\n", 3)


def test_another_program_does_not_run_when_its_parent_is_gone() -> None:
    command = dying_with_us("echo", "running")
    done = _run(*(str(os.getppid()) if part == str(os.getpid()) else part for part in command))
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


def test_a_program_that_does_not_exist_is_named() -> None:
    done = _run(*dying_with_us("/no/such/program"))
    assert done.returncode != 0
    assert "No such file or directory" in done.stderr


@pytest.mark.parametrize("guarded", [None, dying_with_us, ending_with_us])
def test_a_child_of_ours_imports_nothing_of_the_folder_that_it_is_started_in(
    guarded: Callable[..., Sequence[str]] | None, tmp_path: Path
) -> None:
    hostile_folder(tmp_path)
    unsafe = (sys.executable, "-m", "json.tool", "--help")
    for command, status in ((unsafe, HOSTILE_STATUS), (python("json.tool", "--help"), 0)):
        started = guarded(*command) if guarded else command
        assert subprocess.run(started, cwd=tmp_path, capture_output=True, check=False).returncode == status
