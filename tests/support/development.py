"""`astraflow dev` as a real process over a small recipe, to be watched, armed with failpoints and killed.

Everything a run writes is below one folder: `run/` (its --data-dir), `stderr`, and `hits` (the failpoints'
log). Used by tests/e2e, tests/chaos and the benchmark of restarts.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from astraflow_kit.failpoints import Hit, read_hits

ROOT = Path(__file__).parents[2]
RUN_ID, POLICY = "quickstart", "solver"
SMALL = (
    *("--set", "policies.solver.model.warm_start.steps=5"),
    *("--set", "dataflow.groups_per_step=2"),
    *("--set", "dataflow.group_size=4"),
    # Work that died with its lease comes back soon.
    *("--set", "dataflow.lease_ttl_s=4"),
    *("--set", "dataflow.evaluation.num_samples=8"),
    *("--set", "dataflow.evaluation.final_samples=8"),
    *("--set", "trainer.checkpoint_every_steps=2"),
    *("--set", "trainer.optimizer.learning_rate=0.001"),
)
# An untrained model never earns the recipe's own reward, and a step without signal is skipped.
NOISY = ("--set", "raas.reward=noisy_reward:Noisy")
# Name of a role -> how the launcher calls the child; the engine is the node's child.
CHILDREN = {"dataflow": "dataflow", "valkey": "redis", "trainer": "trainer-solver", "node": "node-1"}


class RunFiles:
    """Where a run under `folder` keeps what tests look at."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data_dir = folder / "run"
        """The run's --data-dir."""
        self.addresses = self.data_dir / "addresses"
        """Address files of the daemons."""
        self.stderr = folder / "stderr"
        """What the launcher said."""
        self.hits = folder / "hits"
        """Log of the failpoints."""

    def read_hits(self) -> list[Hit]:
        """Failpoints hit so far."""
        return read_hits(self.hits)

    def read_metrics(self, *kinds: str) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl, of these kinds if any is named."""
        lines = read_lines(self.data_dir / "metrics.jsonl")
        return [line for line in lines if not kinds or line["kind"] in kinds]

    def read_ledger(self, policy: str = POLICY) -> list[dict[str, Any]]:
        """Lines of a trainer's ledger."""
        return read_lines(self.data_dir / "work" / f"trainer-{policy}" / "ledger.jsonl")

    def steps_done(self) -> int:
        """The last finished step that the launcher wrote down."""
        return max((line["step"] for line in self.read_metrics("step")), default=0)

    def steps_taken(self, policy: str = POLICY) -> int:
        """The last step in a trainer's ledger."""
        return max((line["step"] for line in self.read_ledger(policy)), default=0)

    def starts(self) -> list[tuple[str, int]]:
        """(child, pid) of every start the launcher logged, oldest first, over all its lives."""
        lines = read_lines(self.data_dir / "logs" / "launcher.log")
        return [(line["child"], line["pid"]) for line in lines if line.get("event") == "child.started"]

    def processes(self, module: str = "") -> list[psutil.Process]:
        """Living processes of the run, of one module or all."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            command = " ".join(process.info["cmdline"] or ())
            alive = process.info["status"] != psutil.STATUS_ZOMBIE
            if f"{self.data_dir}" in command and module in command and alive and process.pid != os.getpid():
                found.append(process)
        return found


@contextmanager
def dev(
    folder: Path,
    *arguments: str,
    failpoints: str = "",
    recipe: Path = ROOT / "recipes" / "quickstart",
    variables: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """Start `astraflow dev` and end it, whatever the test did."""
    command = [sys.executable, "-m", "astraflow.cli", "dev", str(recipe), "--json"]
    files = RunFiles(folder)
    plugins = ROOT / "tests" / "e2e" / "plugins"
    paths = filter(None, [str(plugins), os.environ.get("PYTHONPATH")])
    environment = {**os.environ, **(variables or {}), "PYTHONPATH": os.pathsep.join(paths)}
    if failpoints:
        environment |= {"ASTRAFLOW_FAILPOINTS": failpoints, "ASTRAFLOW_FAILPOINTS_LOG": str(files.hits)}
    with (
        files.stderr.open("a") as errors,
        subprocess.Popen(
            [*command, "--data-dir", str(files.data_dir), *SMALL, *NOISY, *arguments],
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


@contextmanager
def beside(
    part: str, files: RunFiles, address: str, *arguments: str, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """The `node` or `trainer` of a launch that has none (`--without`); ends by itself, or with the block."""
    role, module = {"node": ("rollout", "astraflow_raas"), "trainer": ("trainer", "astraflow_trainer")}[part]
    work = files.folder / part
    options = {
        "node": ("--node-id", "node-1", "--mirror-dir", str(work / "mirror")),
        "trainer": ("--policy", POLICY, "--cache-dir", str(work / "cache")),
    }[part]
    command = [sys.executable, "-m", module, "--join", address, "--run-id", RUN_ID, "--allow-recipe-code"]
    token = files.data_dir / "secrets" / f"{role}.token"
    command += ["--work-dir", str(work), "--token-file", str(token), *options, *arguments]
    with (
        (files.folder / f"{part}.log").open("wb") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()


def finish(launcher: subprocess.Popen[str], folder: Path, *, timeout_s: float = 200) -> dict[str, Any]:
    """Wait for the end of the run and return its summary."""
    output, _ = launcher.communicate(timeout=timeout_s)
    assert launcher.returncode == 0, RunFiles(folder).stderr.read_text()
    summary: dict[str, Any] = json.loads(output)
    return summary


def wait_for(
    satisfied: Callable[[], object], *, what: str = "it", timeout_s: float = 120, period_s: float = 0.1
) -> None:
    """Look until something holds: other processes tell nobody."""
    deadline = time.monotonic() + timeout_s
    while not satisfied():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s:.0f} s"
        time.sleep(period_s)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Lines that end, as the last one may still be being written; NaN, which is not JSON, is an error."""
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1].splitlines()
    return [json.loads(line, parse_constant=_refuse_constant) for line in whole]


def _refuse_constant(name: str) -> object:
    raise AssertionError(f"{name} is not JSON")
