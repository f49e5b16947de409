"""The user's command gets the number of nodes last; what it does wrong is said with what to do."""

from __future__ import annotations

import asyncio
import os
import signal
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


async def test_a_command_that_hangs_is_named_with_its_limit() -> None:
    with pytest.raises(DeadlineError, match=r"had not ended after 0\.05 s .* give a longer --timeout-s"):
        await CommandHook(["sh", "-c", "sleep 600"], 0.05).resize(3)


async def test_a_command_that_is_ended_takes_with_it_what_it_started(tmp_path: Path) -> None:
    resizing = asyncio.create_task(CommandHook(["sh", "-c", f"{starting(tmp_path)}; wait"], 600).resize(3))
    while not (tmp_path / "pid").exists():  # noqa: ASYNC110 - another process makes it
        await asyncio.sleep(0.02)
    resizing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await resizing
    child = int((tmp_path / "pid").read_text())
    while runs(child):  # noqa: ASYNC110 - it was killed
        await asyncio.sleep(0.02)


async def test_what_a_command_started_goes_on_when_it_has_ended(tmp_path: Path) -> None:
    await CommandHook(["sh", "-c", starting(tmp_path)], 600).resize(3)
    child = int((tmp_path / "pid").read_text())
    assert runs(child)
    os.kill(child, signal.SIGKILL)


def starting(folder: Path) -> str:
    """Of a shell: a process that would take long, its number in the file `pid`."""
    return f"sleep 600 & echo $! > {folder}/part; mv {folder}/part {folder}/pid"


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("command", "named"),
    [("", "'nothing'"), ("no-such-program-here x", "no-such-program-here"), ("'x", "No closing quotation")],
)
def test_what_cannot_be_started_is_refused_before(command: str, named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        CommandHook.parse(command, timeout_s=1)


def test_a_command_line_is_split_as_a_shell_does() -> None:
    assert CommandHook.parse(f"{PYTHON} 'a b' c", timeout_s=1).words == [PYTHON, "a b", "c"]
