"""The user's command gets the number of nodes last; what it does wrong is said with what to do."""

from __future__ import annotations

import asyncio
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


async def test_what_a_command_started_ends_with_it(tmp_path: Path) -> None:
    said = tmp_path / "said"
    code = f"sleep 600 & echo $! > {said}.part; mv {said}.part {said}; wait"
    resizing = asyncio.create_task(CommandHook(["sh", "-c", code], 600).resize(3))
    while not said.exists():  # noqa: ASYNC110 - a file of another process
        await asyncio.sleep(0.02)
    resizing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await resizing
    child = int(said.read_text())
    left = [psutil.Process(child)] if psutil.pid_exists(child) else []
    _, alive = psutil.wait_procs(left, timeout=60)
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


@pytest.mark.parametrize(
    ("command", "named"),
    [("", "'nothing'"), ("no-such-program-here x", "no-such-program-here"), ("'x", "No closing quotation")],
)
def test_what_cannot_be_started_is_refused_before(command: str, named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        CommandHook.parse(command, timeout_s=1)


def test_a_command_line_is_split_as_a_shell_does() -> None:
    assert CommandHook.parse(f"{PYTHON} 'a b' c", timeout_s=1).words == [PYTHON, "a b", "c"]
