"""What `astraflow dev` survives: swaps in the middle of a generation, killed daemons, and its own death."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
SMALL = (
    *("--set", "policies.solver.model.warm_start.steps=5"),
    *("--set", "dataflow.groups_per_step=2"),
    *("--set", "dataflow.group_size=4"),
    *("--set", "dataflow.evaluation.final_samples=8"),
    *("--set", "trainer.checkpoint_every_steps=2"),
    *("--set", "trainer.optimizer.learning_rate=0.001"),
)
# An untrained model never earns the recipe's own reward, and a step without signal is skipped.
NOISY = ("--set", "raas.reward=noisy_reward:Noisy")

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


@contextmanager
def dev(folder: Path, *arguments: str, failpoints: str = "") -> Iterator[subprocess.Popen[str]]:
    """Start `astraflow dev` and end it, whatever the test did."""
    command = [sys.executable, "-m", "astraflow.cli", "dev", str(ROOT / "recipes" / "quickstart"), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent / "plugins")}
    if failpoints:
        environment |= {"ASTRAFLOW_FAILPOINTS": failpoints, "ASTRAFLOW_FAILPOINTS_LOG": str(folder / "hits")}
    with (
        (folder / "stderr").open("w") as errors,
        subprocess.Popen(
            [*command, "--data-dir", str(folder / "run"), *SMALL, *NOISY, *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
            start_new_session=True,
        ) as launcher,
    ):
        try:
            yield launcher
        finally:
            launcher.kill()


def finish(launcher: subprocess.Popen[str], folder: Path, *, timeout_s: float = 200) -> dict[str, Any]:
    """Wait for the end of the run and return its summary."""
    output, _ = launcher.communicate(timeout=timeout_s)
    assert launcher.returncode == 0, (folder / "stderr").read_text()
    summary: dict[str, Any] = json.loads(output)
    return summary


def wait_for(satisfied: Callable[[], object], *, timeout_s: float = 120) -> None:
    """Look until something holds: other processes tell nobody."""
    deadline = time.monotonic() + timeout_s
    while not satisfied():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def steps_done(folder: Path) -> int:
    """Finished steps so far."""
    path = folder / "run" / "metrics.jsonl"
    return sum('"kind": "step"' in line for line in path.read_text().splitlines()) if path.exists() else 0


def processes(folder: Path, module: str = "") -> list[psutil.Process]:
    """Living processes of the run, of one module or all."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = " ".join(process.info["cmdline"] or ())
        alive = process.info["status"] != psutil.STATUS_ZOMBIE
        if str(folder) in command and module in command and alive and process.pid != os.getpid():
            found.append(process)
    return found


def test_weights_swapped_in_the_middle_of_a_generation_leave_two_spans_in_a_trained_trajectory(
    tmp_path: Path,
) -> None:
    with dev(tmp_path, "--steps", "6", failpoints="engine.decode_step=sleep:0.05") as launcher:
        finish(launcher, tmp_path)
    assert "engine.decode_step" in (tmp_path / "hits").read_text()
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    spans = [
        line["num_version_spans_max"] for line in lines if line["kind"] == "step" and not line["skipped"]
    ]
    assert max(spans) >= 2


@pytest.mark.parametrize(
    "module", ["astraflow_dataflow", "astraflow_raas", "astraflow_trainer", "astraflow_engine"]
)
def test_a_killed_daemon_is_restarted_and_the_run_goes_on(tmp_path: Path, module: str) -> None:
    with dev(tmp_path, "--steps", "8") as launcher:
        wait_for(lambda: steps_done(tmp_path) >= 3)
        for process in processes(tmp_path, f"-m {module}"):
            process.send_signal(signal.SIGKILL)
        summary = finish(launcher, tmp_path)
    assert summary["steps"] == 8
    assert summary["conservation_error"] == 0
    assert trained_once(tmp_path)


def trained_once(folder: Path) -> bool:
    """Whether no trajectory is in two steps of the trainer's ledger (a replay repeats a step verbatim)."""
    ledger = (folder / "run" / "work" / "trainer-solver" / "ledger.jsonl").read_text().splitlines()
    step_of: dict[str, int] = {}
    for line in map(json.loads, ledger):
        for trajectory_id in line["trajectory_ids"]:
            if step_of.setdefault(trajectory_id, line["step"]) != line["step"]:
                return False
    return True


def test_everything_dies_with_a_killed_launcher(tmp_path: Path) -> None:
    with dev(tmp_path, "--steps", "1000") as launcher:
        wait_for(lambda: steps_done(tmp_path) >= 1)
        children = psutil.Process(launcher.pid).children(recursive=True)
        assert len(children) >= 5  # Redis, dataflow, trainer, node, engine
        launcher.kill()
        _, alive = psutil.wait_procs(children, timeout=10)
        assert alive == []


def test_ctrl_c_finishes_the_run_in_order(tmp_path: Path) -> None:
    with dev(tmp_path, "--steps", "1000") as launcher:
        wait_for(lambda: steps_done(tmp_path) >= 1)
        launcher.send_signal(signal.SIGINT)
        summary = finish(launcher, tmp_path)
    assert summary["steps"] >= 1
    assert summary["heldout_n"] == 8
    assert summary["conservation_error"] == 0


def test_a_run_without_a_node_says_what_it_waits_for(tmp_path: Path) -> None:
    with dev(tmp_path, "--without", "raas", "--timeout", "25") as launcher:
        summary = finish(launcher, tmp_path)
    assert summary["steps"] == 0
    assert "no_node" in (tmp_path / "stderr").read_text()
