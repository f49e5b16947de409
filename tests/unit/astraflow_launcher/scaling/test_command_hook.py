"""The user's command gets the number of nodes last; what it does wrong is said with what to do."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from astraflow.errors import DeadlineError, InvalidArgumentError, UnavailableError
from astraflow_launcher.scaling.command_hook import CommandHook

PYTHON = sys.executable


async def test_the_number_of_nodes_comes_last(tmp_path: Path) -> None:
    code = f"import sys, pathlib; pathlib.Path({str(tmp_path / 'said')!r}).write_text(' '.join(sys.argv[1:]))"
    await CommandHook([PYTHON, "-c", code, "eu", "--now"], 60).resize(3)
    assert (tmp_path / "said").read_text() == "eu --now 3"


async def test_a_failure_carries_status_and_last_words() -> None:
    hook = CommandHook([PYTHON, "-c", "import sys; print('no quota', file=sys.stderr); sys.exit(4)"], 60)
    with pytest.raises(UnavailableError, match="ended with status 4: no quota"):
        await hook.resize(3)


async def test_a_command_that_hangs_ends_with_all_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    started = f"import pathlib, subprocess, sys; child = subprocess.Popen(['sleep', '600']); pathlib.Path({str(pid)!r})"
    code = f"{started}.write_text(str(child.pid)); child.wait()"
    with pytest.raises(DeadlineError, match="give a longer --timeout-s"):
        await CommandHook([PYTHON, "-c", code], 5).resize(3)
    psutil.wait_procs(
        [psutil.Process(int(pid.read_text()))] if psutil.pid_exists(int(pid.read_text())) else [], 20
    )
    child = int(pid.read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("command", "named"),
    [("", "'nothing'"), ("no-such-program-here x", "no-such-program-here"), ("'x", "No closing quotation")],
)
def test_what_cannot_be_started_is_refused_before(command: str, named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        CommandHook.parse(command, timeout_s=1)


def test_a_command_line_is_split_as_a_shell_does() -> None:
    assert CommandHook.parse(f"{PYTHON} 'a b' c", timeout_s=1).words == [PYTHON, "a b", "c"]
