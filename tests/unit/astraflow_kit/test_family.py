"""A program ends with everything it started, whoever is killed first: all of them hold a pipe, which then closes."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

import pytest

from astraflow_kit.family import ending_with_us

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="uses prctl")

# A program with a helper, and one that made itself a daemon: a session of its own, and no parent but its adopter.
_PROGRAM = """
import os, signal, subprocess, sys, time
def say(name):
    os.write(1, f"{name} {os.getpid()}\\n".encode())
if sys.argv[1] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if not os.fork():
    say("helper"); time.sleep(600)
if not os.fork():
    os.setsid()
    if os.fork():
        os._exit(0)
    say("daemon"); time.sleep(600)
say("program"); time.sleep(600)
"""
_PARENT = """
import subprocess, sys, time
from astraflow_kit.family import ending_with_us
child = subprocess.Popen(ending_with_us(sys.executable, "-c", sys.argv[1], sys.argv[2]), start_new_session=True)
print("guard", child.pid, flush=True)
sys.exit(child.wait())
"""


@contextmanager
def family(mode: str = "plain") -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes], dict[str, int]]]:
    """Who asked for the program, the pipe that all of them hold, and their pids."""
    command = [sys.executable, "-c", _PARENT, _PROGRAM, mode]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pids = {"parent": parent.pid}
        while len(pids) < 5:
            name, pid = parent.stdout.readline().split()
            pids[name.decode()] = int(pid)
        try:
            yield parent, parent.stdout, pids
        finally:
            parent.kill()


def all_are_gone(said: IO[bytes]) -> None:
    """Returns when the last of them has closed the pipe; hangs, until the test's own limit, when one stays."""
    said.read()


@pytest.mark.parametrize("victim", ["parent", "program"])
def test_nothing_is_left_when_one_is_killed(victim: str) -> None:
    with family() as (_, said, pids):
        os.kill(pids[victim], signal.SIGKILL)
        all_are_gone(said)


def test_the_program_does_not_outlive_its_guard() -> None:
    with family() as (_, said, pids):
        os.kill(pids["guard"], signal.SIGKILL)
        for orphan in ("helper", "daemon"):
            os.kill(pids[orphan], signal.SIGKILL)
        all_are_gone(said)


ENDS: dict[str, tuple[str, Callable[[int], None]]] = {
    "politely": ("plain", lambda guard: os.kill(guard, signal.SIGTERM)),
    "at once": ("stubborn", lambda guard: os.kill(guard, signal.SIGINT)),
}


@pytest.mark.parametrize("how", ENDS)
def test_it_ends_when_asked_to_and_as_the_program_did(how: str) -> None:
    mode, ask = ENDS[how]
    with family(mode) as (parent, said, pids):
        ask(pids["guard"])
        all_are_gone(said)
        expected = signal.SIGTERM if how == "politely" else signal.SIGKILL
        assert parent.wait() == (-expected) % 256


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_arguments_and_status_are_those_of_the_program() -> None:
    done = _run(*ending_with_us("sh", "-c", 'echo "$0 $1"; exit 3', "first", "two words"))
    assert (done.stdout, done.returncode) == ("first two words\n", 3)


def test_the_program_does_not_outlive_a_parent_that_is_already_gone() -> None:
    command = ending_with_us("sleep", "600")
    done = _run(*(str(os.getppid()) if part == str(os.getpid()) else part for part in command))
    assert done.returncode == -signal.SIGKILL


def test_a_program_that_does_not_exist_is_named() -> None:
    done = _run(*ending_with_us("/no/such/program"))
    assert done.returncode != 0
    assert "No such file or directory" in done.stderr


# Leaves an orphan that has ended, and says which of the first process's children nobody has reaped.
_LEAVES_ORPHANS = """
import os, pathlib, time
if not os.fork():
    os.fork()
    os._exit(0)
os.wait()
def dead():
    rows = (path.read_text().rpartition(")")[2].split() for path in pathlib.Path("/proc").glob("[0-9]*/stat"))
    return [row for row in rows if row[0] == "Z"]
until = time.monotonic() + 10
while dead() and time.monotonic() < until:
    time.sleep(0.01)
print(os.getppid(), len(dead()))
os.kill(os.getpid(), 9)
"""


def test_the_first_process_of_a_container_reaps_and_tells_how_its_program_ended() -> None:
    namespace = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")
    if _run(*namespace, "true").returncode:
        pytest.skip("no process namespace can be made here")
    done = _run(
        *namespace, sys.executable, "-m", "astraflow_kit.family", "0", sys.executable, "-c", _LEAVES_ORPHANS
    )
    assert (done.stdout, done.returncode) == ("1 0\n", 128 + signal.SIGKILL), done.stderr
