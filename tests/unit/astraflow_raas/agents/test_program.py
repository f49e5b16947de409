"""A program of an agent ends with its node, however that ends."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil

from support.development import wait_for

NODE = """
import asyncio, os, sys
from pathlib import Path
from astraflow_raas.agents.program import run_program

command = [sys.executable, "-c", sys.argv[1]]
asyncio.run(run_program(command, environment=dict(os.environ), folder=Path.cwd(), timeout_s=None))
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


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
