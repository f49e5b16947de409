"""`astraflow dev recipes/quickstart`: three real daemons, real Redis, real weight versions, three steps."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from astraflow_weights.mirror.checkpoint import map_model
from astraflow_weights.store import open_store
from support.development import ROOT, RUN_ID, RunFiles
from support.published_models import pulled, read_log
from support.weight_models import same_model

SHORT = (
    *("--set", "policies.solver.model.warm_start.steps=12"),
    *("--set", "dataflow.evaluation.final_samples=32"),
    *("--set", "trainer.checkpoint_every_steps=2"),
)
STEPS = 3

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


@dataclass(frozen=True)
class Run:
    """A finished run: what it printed and where it lies."""

    summary: dict[str, Any]
    files: RunFiles
    stderr: str

    @property
    def folder(self) -> Path:
        return self.files.data_dir


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three steps of the quickstart with a warm start too short to be any good."""
    return dev(RunFiles(tmp_path_factory.mktemp("quickstart")), "--steps", str(STEPS), *SHORT)


def dev(files: RunFiles, *arguments: str) -> Run:
    """Run `astraflow dev recipes/quickstart --json` to its end."""
    command = [sys.executable, "-m", "astraflow.cli", "dev", str(ROOT / "recipes" / "quickstart"), "--json"]
    command += ["--data-dir", str(files.data_dir), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, f"{done.stderr}\n{_logs(files.data_dir)}"
    return Run(json.loads(done.stdout), files, done.stderr)


def test_the_run_takes_its_steps_and_publishes_a_version_for_each(run: Run) -> None:
    steps = run.files.read_metrics("step")
    assert [line["step"] for line in steps] == [1, 2, 3]
    committed = [line for line in steps if not line["skipped"]]
    assert run.summary["steps"] == STEPS
    assert run.summary["versions"] == len(run.files.read_metrics("version")) == 1 + len(committed)


def test_nothing_is_lost(run: Run) -> None:
    account = run.summary["trajectories"]
    terms = ("trained", "in_batch", "ready", "assembling", "evaluated")
    assert run.summary["conservation_error"] == 0
    assert account["ingested"] == sum(account[term] for term in terms) + sum(account["dropped"].values())


def test_every_trained_trajectory_is_in_the_trainers_own_ledger_exactly_once(run: Run) -> None:
    stages: dict[str, list[str]] = {"TRAINED": [], "SKIPPED": []}
    for line in run.files.read_ledger():
        stages[line["stage"]] += line["trajectory_ids"]
    assert max(Counter(stages["TRAINED"] + stages["SKIPPED"]).values()) == 1
    assert len(stages["TRAINED"]) == run.summary["trajectories"]["trained"]
    assert len(stages["SKIPPED"]) == run.summary["trajectories"]["dropped"].get("skipped", 0)


def test_the_first_and_the_final_version_are_evaluated_on_held_out_tasks(run: Run) -> None:
    evaluations = run.files.read_metrics("evaluation")
    assert evaluations[0]["version"] == 0
    assert evaluations[-1]["final"]
    assert run.summary["heldout_n"] == evaluations[0]["num_samples"] == 32


def test_staleness_stays_within_the_recipes_bound(run: Run) -> None:
    assert 0 <= run.summary["staleness"]["p50"] <= run.summary["staleness"]["max"] <= 2


def test_nodes_fetch_one_snapshot_and_then_deltas_that_are_smaller(run: Run) -> None:
    assert run.summary["snapshots_fetched"] == 1
    if run.summary["versions"] > 1:
        assert 0 < run.summary["delta_bytes_mean"] < 0.5 * run.summary["snapshot_bytes"]


def test_the_nodes_weights_are_the_published_bytes(run: Run) -> None:
    store, newest = open_store((run.folder / "store").as_uri()), run.summary["versions"] - 1
    assert len(read_log(store, run_id=RUN_ID).records) == newest + 1
    served = map_model(next((run.folder / "work" / "node-1").rglob("model.safetensors")).parent)
    assert same_model(served, pulled(store, newest, run_id=RUN_ID))


def test_ids_lead_from_task_to_trajectory_to_step_and_correlate_the_logs_of_all_daemons(run: Run) -> None:
    first = run.files.read_ledger()[0]
    pushed = _log_lines(run, "node-1", event="episode.pushed")
    [episode] = [line for line in pushed if first["trajectory_ids"][0] in line["trajectory_ids"]]
    task_id = episode["task_id"]
    assert (task_id.startswith("train-"), episode["outcome"]) == (True, "accepted")
    [step] = _log_lines(run, "trainer-solver", event="step.finished", batch_id=first["batch_id"])
    assert step["step"] == first["step"] == 1
    assert _log_lines(run, "dataflow", event="group.settled", correlation_id=task_id)
    assert _log_lines(run, "node-1", correlation_id=task_id)

    for event in ("batch.bound", "batch.acked"):
        assert _log_lines(run, "dataflow", event=event, correlation_id="solver/step-1", step=1), event
    assert _log_lines(run, "trainer-solver", event="step.finished", correlation_id="solver/step-1")

    # A step without signal publishes nothing, the starting weights always are.
    for process, event in (("trainer-solver", "version.published"), ("dataflow", "version.announced")):
        assert _log_lines(run, process, event=event, correlation_id="solver/step-0", version=0), process


def test_the_run_leaves_a_summary_curves_and_a_log_per_process(run: Run) -> None:
    assert json.loads((run.folder / "summary.json").read_text()) == run.summary
    assert (run.folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    logs = {path.stem for path in (run.folder / "logs").iterdir()}
    assert {"redis", "dataflow", "node-1", "trainer-solver", "launcher"} <= logs
    assert "final evaluation" in run.stderr


def test_no_process_is_left_behind(run: Run) -> None:
    commands = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert [command for command in commands if str(run.folder) in command] == []


def test_a_finished_run_is_resumed_without_training_again(run: Run) -> None:
    again = dev(run.files, "--steps", str(STEPS), *SHORT)
    assert again.summary["steps"] == STEPS
    assert again.summary["trajectories"]["trained"] == run.summary["trajectories"]["trained"]
    assert again.summary["conservation_error"] == 0


def _log_lines(run: Run, process: str, **fields: object) -> list[dict[str, Any]]:
    text = (run.folder / "logs" / f"{process}.log").read_text()
    lines = (json.loads(line) for line in text.splitlines() if line.startswith("{"))
    return [line for line in lines if fields.items() <= line.items()]


def _logs(folder: Path) -> str:
    tails = []
    for path in sorted((folder / "logs").glob("*.log")):
        tails.append(f"== {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-8:]))
    return "\n".join(tails)
