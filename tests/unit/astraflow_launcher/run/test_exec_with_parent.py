"""A program started through `exec_with_parent` keeps its pid and arguments, and needs the parent it names."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="uses prctl")

_THROUGH = (sys.executable, "-m", "astraflow_launcher.run.exec_with_parent")


def _run(parent_pid: int, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*_THROUGH, str(parent_pid), *argv], capture_output=True, text=True, timeout=20)


def test_the_program_takes_the_place_of_the_process_with_its_arguments() -> None:
    command = [*_THROUGH, str(os.getpid()), "sh", "-c", 'echo "$$ $0 $1"', "first", "two words"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        said, _ = process.communicate(timeout=20)
    assert said == f"{process.pid} first two words\n"


def test_its_exit_status_is_the_programs() -> None:
    assert _run(os.getpid(), "sh", "-c", "exit 3").returncode == 3


def test_the_program_does_not_run_when_the_parent_is_another() -> None:
    done = _run(os.getppid(), "echo", "running")
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


def test_a_program_that_does_not_exist_is_named() -> None:
    done = _run(os.getpid(), "/no/such/program")
    assert done.returncode != 0
    assert "No such file or directory" in done.stderr
