"""Long callbacks are found from outside, by CPU time, in the process that is asked about and in no other."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from astraflow_bench.rollout.callbacks import CallbackWatch

PROGRAM = """
import asyncio, time

async def burn(seconds):
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s: pass

async def main():
    await asyncio.to_thread(time.sleep, 0.2)
    await asyncio.gather(burn(0.08), burn(0.0001))
    asyncio.get_running_loop().call_soon(time.sleep, 0.1)
    await asyncio.sleep(0)

asyncio.run(main())
"""


@pytest.fixture
def watch(tmp_path: Path) -> CallbackWatch:
    return CallbackWatch(module="watched", file=tmp_path / "callbacks.jsonl")


def run(watch: CallbackWatch, folder: Path, module: str) -> None:
    (folder / f"{module}.py").write_text(PROGRAM)
    environment = os.environ | watch.environment
    subprocess.run([sys.executable, "-m", module], cwd=folder, env=environment, check=True)


def test_a_callback_counts_by_its_cpu_time_and_once(watch: CallbackWatch, tmp_path: Path) -> None:
    run(watch, tmp_path, "watched")
    long = [callback for cpu_ms, callback in watch.new() if cpu_ms > 50]
    assert ["burn" in callback for callback in long] == [True]
    assert watch.new() == []


def test_the_figure_names_a_callback_that_is_too_long(watch: CallbackWatch, tmp_path: Path) -> None:
    assert watch.figure("idle").met
    run(watch, tmp_path, "watched")
    figure = watch.figure("busy")
    assert not figure.met
    assert "burn" in figure.what


def test_other_processes_are_left_alone(watch: CallbackWatch, tmp_path: Path) -> None:
    run(watch, tmp_path, "other")
    assert watch.new() == []
