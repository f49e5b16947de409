"""A sandbox ends with its caller, its time or its node, and nothing of it stays on the machine."""

import asyncio
import os
import random
import signal
import sys
from pathlib import Path

import psutil
import pytest

from astraflow.plugins import RewardFailed
from astraflow_raas.programs.run import Order, ProgramLimits, run_program
from astraflow_raas.programs.sandbox import JUDGE, PROGRAM, Sandbox
from support.sandbox import needs_bubblewrap
from support.scripted_dataflow import eventually

pytestmark = needs_bubblewrap

ENDLESS = Order(
    kind="calls", program="def f():\n while True: pass", tests={"inputs": [[]], "results": [1]}, name="f"
)


@pytest.fixture
def sandbox() -> Sandbox:
    """One that is known among all others by its host's name."""
    return Sandbox(python=Path(sys.executable).resolve(), hostname=f"sandbox-{random.randrange(10**9)}")


def is_alive(sandbox: Sandbox) -> bool:
    """Whether its namespaces live: those of bwrap's processes, which all others die with."""
    return any(
        sandbox.hostname in (process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
    )


async def test_a_cancelled_episode_takes_its_program_along(sandbox: Sandbox) -> None:
    running = asyncio.create_task(
        run_program(ENDLESS, sandbox=sandbox, limits=ProgramLimits(test_s=600, wall_s=600))
    )
    await eventually(lambda: is_alive(sandbox), what="the sandbox runs")
    running.cancel()
    await asyncio.wait((running,))
    await eventually(lambda: not is_alive(sandbox), what="the sandbox is gone")


async def test_the_wall_clock_ends_all_tests_together(sandbox: Sandbox) -> None:
    found = await run_program(ENDLESS, sandbox=sandbox, limits=ProgramLimits(test_s=600, wall_s=3))
    assert (found.results, found.ending) == ([], "timeout")
    await eventually(lambda: not is_alive(sandbox), what="the sandbox is gone")


async def test_a_kill_of_the_group_at_any_instant_of_the_start_leaves_no_process(sandbox: Sandbox) -> None:
    waits_for_its_order, order = os.pipe()
    for _ in range(100):
        outer = await asyncio.create_subprocess_exec(
            *sandbox.command_line(random.choice((PROGRAM, JUDGE)), ProgramLimits()),
            stdin=waits_for_its_order,
            stdout=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        await asyncio.sleep(random.uniform(0, 0.015))
        os.killpg(outer.pid, signal.SIGKILL)
        await outer.wait()
    await eventually(lambda: not is_alive(sandbox), what="all are gone")
    os.close(order)
    os.close(waits_for_its_order)


async def test_a_sandbox_that_does_not_start_is_no_fault_of_the_program(tmp_path: Path) -> None:
    with pytest.raises(RewardFailed, match="the sandbox did not start"):
        await run_program(
            ENDLESS, sandbox=Sandbox(python=tmp_path / "bin" / "python"), limits=ProgramLimits()
        )
