"""A child that asked for it, or was started for it, dies with its parent, also when that is already gone."""

import os
import select
import signal
import subprocess
import sys

import pytest

from astraflow_kit.parent import dying_with_us

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


def _family(mode: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", _PARENT, _CHILD, mode], stdout=subprocess.PIPE, start_new_session=True
    )


def _read_until_all_writers_are_gone(descriptor: int) -> bytes:
    """The pipe ends when both parent and child are dead: no polling of pids that may be reused."""
    said = b""
    while select.select([descriptor], [], [], 20)[0]:
        chunk = os.read(descriptor, 4096)
        if not chunk:
            return said
        said += chunk
    raise AssertionError(f"a process still holds the pipe after 20 s; it said {said!r}")


def _read_until(descriptor: int, word: bytes) -> None:
    said = b""
    while word not in said:
        assert select.select([descriptor], [], [], 20)[0], f"no {word!r} after 20 s, only {said!r}"
        said += os.read(descriptor, 4096)


def test_the_child_dies_when_its_parent_is_killed() -> None:
    with _family("early") as parent:
        assert parent.stdout is not None
        try:
            _read_until(parent.stdout.fileno(), b"armed")
            parent.kill()
            _read_until_all_writers_are_gone(parent.stdout.fileno())
        finally:
            parent.kill()


def test_a_child_armed_after_its_parent_died_ends_at_once() -> None:
    with _family("late") as parent:
        assert parent.stdout is not None
        try:
            said = _read_until_all_writers_are_gone(parent.stdout.fileno())
        finally:
            parent.kill()
    assert b"armed" not in said


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_another_program_keeps_the_pid_it_was_started_under_and_its_arguments() -> None:
    command = dying_with_us("sh", "-c", 'echo "$$ $0 $1"; exit 3', "first", "two words")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        said, _ = process.communicate(timeout=60)
    assert said == f"{process.pid} first two words\n"
    assert process.returncode == 3


def test_another_program_does_not_run_when_its_parent_is_gone() -> None:
    command = dying_with_us("echo", "running")
    done = _run(*(str(os.getppid()) if part == str(os.getpid()) else part for part in command))
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


def test_a_program_that_does_not_exist_is_named() -> None:
    done = _run(*dying_with_us("/no/such/program"))
    assert done.returncode != 0
    assert "No such file or directory" in done.stderr
