"""A child that asked for it dies with its parent, also when the parent is already gone."""

import os
import select
import subprocess
import sys

import pytest

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
