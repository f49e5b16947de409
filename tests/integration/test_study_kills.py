"""However a study is ended, nothing that it started goes on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.integration

PLAYS_DEV = """
import os, subprocess, sys, time
if sys.orig_argv[1:5] == ["-P", "-m", "astraflow.cli", "dev"]:
    own = subprocess.Popen(["sleep", "600"], start_new_session=True)
    with open(os.environ["PIDS"] + ".new", "w") as file:
        file.write(f"{os.getpid()} {own.pid}")
    os.rename(os.environ["PIDS"] + ".new", os.environ["PIDS"])
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_study_that_is_killed_takes_its_runs_with_it(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(PLAYS_DEV)
    pids = tmp_path / "pids"
    command = [sys.executable, "-m", "astraflow.cli", "study", "quickstart", "--only", "recipe"]
    command += ["--out", str(tmp_path), "--runs", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PIDS": str(pids)}
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.DEVNULL, start_new_session=True
    ) as study:
        try:
            until(pids.exists)
            started = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
            study.send_signal(number)
            assert study.wait(60) != 0
        finally:
            study.kill()
    until(lambda: not any(gone_on(process) for process in started))
    assert not (tmp_path / "quickstart-study.jsonl").exists(), "what was killed is no result"


def until(condition: object) -> None:
    """Wait, for as long as the test may take."""
    while not condition():  # type: ignore[operator]
        time.sleep(0.05)


def gone_on(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
