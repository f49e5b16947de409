"""A program of an agent ends with its node, however that ends, and at the latest with its budget; within walls and
without.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from astraflow_kit.sandbox.budget import Budget
from astraflow_kit.sandbox.machine_walls import MachineWalls
from astraflow_raas.agents.program import AgentFailed, run_program
from support.development import wait_for
from support.marked import alive_with
from support.sandbox import needs_bubblewrap

NODE = """
import asyncio, os, sys
from pathlib import Path
from astraflow_kit.sandbox.budget import Budget
from astraflow_kit.sandbox.machine_walls import MachineWalls
from astraflow_raas.agents.program import run_program

own, source, is_walled = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
walls = MachineWalls(own=own, writable=(Path.cwd(),)) if is_walled else None
asyncio.run(
    run_program(
        [sys.executable, "-c", source],
        environment=dict(os.environ),
        folder=Path.cwd(),
        timeout_s=None,
        budget=Budget(),
        walls=walls,
    )
)
"""
AGENT = """
import os, subprocess, sys, time
stray = subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); time.sleep(600)"])
open("started", "w")
time.sleep(600)
"""
WALLED = pytest.mark.parametrize("is_walled", [pytest.param(True, marks=needs_bubblewrap), False])


@pytest.fixture
def own() -> Iterator[Path]:
    """The folder of an episode."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@WALLED
def test_a_killed_node_leaves_nothing_of_its_agents(is_walled: bool, tmp_path: Path, own: Path) -> None:
    variables = {**os.environ, "MARK": tmp_path.name}
    started = [sys.executable, "-c", NODE, str(own), AGENT, str(is_walled)]
    with subprocess.Popen(started, cwd=tmp_path, env=variables) as node:
        wait_for((tmp_path / "started").exists, what="the agent has started another process")
        assert len(alive_with(tmp_path.name)) >= 4
        node.send_signal(signal.SIGKILL)
    wait_for(lambda: not alive_with(tmp_path.name), what="all are gone")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("bytearray(2**30)", "MemoryError"),
        ("open('big', 'wb').write(bytes(2**21))", "File too large|SIGXFSZ|No space left"),
        ("while True: pass", "SIGXCPU|SIGKILL"),
        ("print('x' * 10**6)", "wrote more than 65536 bytes"),
    ],
)
@WALLED
async def test_an_agent_that_goes_beyond_its_budget_fails_by_name(
    source: str, words: str, is_walled: bool, own: Path
) -> None:
    budget = Budget(memory_mb=512, disk_mb=1, cpu_s=1, output_kb=64)
    running = run_program(
        (sys.executable, "-c", source),
        environment=dict(os.environ),
        folder=own,
        timeout_s=60,
        budget=budget,
        walls=MachineWalls(own=own) if is_walled else None,
    )
    with pytest.raises(AgentFailed, match=words):
        await running
