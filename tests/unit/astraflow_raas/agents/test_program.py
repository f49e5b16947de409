"""A program of an agent ends with its node, however that ends, and at the latest with its budget."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from astraflow_kit.sandbox.budget import Budget
from astraflow_raas.agents.program import AgentFailed, run_program
from support.development import wait_for

NODE = """
import asyncio, os, sys
from pathlib import Path
from astraflow_kit.sandbox.budget import Budget
from astraflow_raas.agents.program import run_program

command = [sys.executable, "-c", sys.argv[1]]
asyncio.run(
    run_program(command, environment=dict(os.environ), folder=Path.cwd(), timeout_s=None, budget=Budget())
)
"""
AGENT = """
import os, subprocess, sys, time
stray = subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); time.sleep(600)"])
open("pids.part", "w").write(f"{os.getpid()} {stray.pid}")
os.rename("pids.part", "pids")
time.sleep(600)
"""


def test_a_killed_node_leaves_nothing_of_its_agents(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with subprocess.Popen([sys.executable, "-c", NODE, AGENT], cwd=tmp_path) as node:
        wait_for(pids.exists, what="the agent has started another process")
        node.send_signal(signal.SIGKILL)
    wait_for(lambda: not any(map(runs, map(int, pids.read_text().split()))), what="both are gone")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("bytearray(2**30)", "MemoryError"),
        ("open('big', 'wb').write(bytes(2**21))", "File too large|SIGXFSZ"),
        ("while True: pass", "SIGXCPU|SIGKILL"),
        ("print('x' * 10**6)", "wrote more than 65536 bytes"),
    ],
)
async def test_an_agent_that_goes_beyond_its_budget_fails_by_name(
    source: str, words: str, tmp_path: Path
) -> None:
    budget = Budget(memory_mb=512, disk_mb=1, cpu_s=1, output_kb=64)
    running = run_program(
        (sys.executable, "-c", source),
        environment=dict(os.environ),
        folder=tmp_path,
        timeout_s=60,
        budget=budget,
    )
    with pytest.raises(AgentFailed, match=words):
        await running


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
