"""Memory counts a process with all its descendants, and shared pages once."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from astraflow_launcher.run.memory import PeakMemory, tree_pss_bytes

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

MIB = 2**20
_HOLDS = """
import sys
held = b"x" * (int(sys.argv[1]) * 2**20)
print("ready", flush=True)
sys.stdin.read()
"""
_HAS_CHILD = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-S", "-c", {_HOLDS!r}, sys.argv[1]], stdin=subprocess.PIPE)
sys.stdin.read()
child.communicate()
"""


@contextmanager
def _process(code: str, *, held_mib: int) -> Iterator[int]:
    """A process that holds memory, itself or in a child, until its input ends."""
    command = [sys.executable, "-S", "-c", code, str(held_mib)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
        process.communicate()


@pytest.mark.parametrize("code", [_HOLDS, _HAS_CHILD], ids=["itself", "its child"])
def test_what_a_process_or_its_child_holds_is_counted(code: str) -> None:
    with _process(code, held_mib=1) as small, _process(code, held_mib=33) as large:
        more_bytes = tree_pss_bytes(large) - tree_pss_bytes(small)
    assert 28 * MIB < more_bytes < 36 * MIB


def test_shared_pages_are_not_counted_for_each_user() -> None:
    with _process(_HOLDS, held_mib=1) as pid:
        assert 0 < tree_pss_bytes(pid) < psutil.Process(pid).memory_info().rss


def test_a_process_that_has_ended_holds_nothing() -> None:
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert tree_pss_bytes(ended.pid) == 0  # a zombie: the kernel still knows the pid
    ended.wait()
    assert tree_pss_bytes(ended.pid) == 0


def test_the_peak_stays_when_the_memory_is_given_back() -> None:
    peak = PeakMemory()
    with _process(_HOLDS, held_mib=64):
        high_bytes = peak.sample()
    assert high_bytes >= 64 * MIB
    assert peak.sample() >= high_bytes
    assert tree_pss_bytes(os.getpid()) < high_bytes
