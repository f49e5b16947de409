"""`astraflow eval recipes/quickstart`: real daemons score version 0, then that version from the first run's store."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.development import ROOT, RUN_ID

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

TASKS, SAMPLES = 6, 4
QUICKSTART = str(ROOT / "recipes" / "quickstart")


def evaluate(folder: Path, *arguments: str) -> dict[str, Any]:
    """What `astraflow eval --json` prints, of a run in `folder`."""
    command = [sys.executable, "-m", "astraflow.cli", "eval", QUICKSTART, "--json", "--data-dir", str(folder)]
    command += ["--tasks", str(TASKS), "--samples", str(SAMPLES), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an evaluation of what the recipe starts from, after a warm start too short to be any good."""
    folder = tmp_path_factory.mktemp("eval") / "first"
    evaluate(folder, "--set", "policies.solver.model.warm_start.steps=12")
    return folder


def test_every_sample_has_a_result_and_the_scores_are_of_them(first: Path) -> None:
    found = json.loads((first / "summary.json").read_text())
    assert found["complete"] is True
    assert found["samples"] == {"planned": TASKS * SAMPLES, "results": TASKS * SAMPLES, "per_task": SAMPLES}
    tasks = [json.loads(line) for line in (first / "samples.jsonl").read_text().splitlines()]
    assert [task["index"] for task in tasks] == list(range(TASKS))
    rewards = [[sample["reward"] for sample in task["samples"]] for task in tasks]
    assert {len(own) for own in rewards} == {SAMPLES}
    whole = found["scores"][0]
    assert (whole["source"], whole["num_tasks"], whole["num_samples"]) == ("", TASKS, TASKS * SAMPLES)
    assert whole["mean_reward"] == pytest.approx(sum(map(sum, rewards)) / (TASKS * SAMPLES))
    passed = sum(any(reward >= 1 for reward in own) for own in rewards) / TASKS
    assert {item["k"]: item["value"] for item in whole["pass_at_k"]}[SAMPLES] == pytest.approx(passed)


def test_nothing_is_trained_and_only_version_0_published(first: Path) -> None:
    kinds = [json.loads(line)["kind"] for line in (first / "metrics.jsonl").read_text().splitlines()]
    assert sorted(kinds) == ["evaluation", "version"]
    assert not list(first.glob("work/trainer-solver/checkpoints/step-*"))


def test_a_version_of_that_run_is_evaluated_from_its_store(first: Path, tmp_path: Path) -> None:
    uri = (first / "store").as_uri()
    found = evaluate(tmp_path / "second", "--weights", uri, "--run", RUN_ID, "--version", "0")
    before = json.loads((first / "summary.json").read_text())
    # Equal weights, tasks and seeds, on an engine of one thread; batches of other sizes may round differently.
    assert found["samples"] == before["samples"]
    assert found["scores"][0]["num_tasks"] == TASKS
