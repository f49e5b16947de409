"""A recipe whose reward fails every task: `astraflow dev` says where it raised, stops, and exits with an error."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.development import ROOT, RunFiles, dev, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


def test_a_reward_that_always_raises_stops_the_run_and_is_named_with_its_line(tmp_path: Path) -> None:
    recipe, line = _recipe(tmp_path / "broken")
    options = (
        "--set",
        "dataflow.max_identical_failures=30",
        "--set",
        "raas.reward_limits.processes=1",
    )
    files = RunFiles(tmp_path)
    with dev(
        tmp_path, "--steps", "50", *options, "--set", "raas.reward=recipe:BoxedSum", recipe=recipe
    ) as launcher:
        wait_for(lambda: f"recipe.py:{line}" in files.stderr.read_text(), what="the place on the screen")
        why = _why(files)
        output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 1
    summary = json.loads(output)
    failure = summary["failures"][0]
    assert "KeyError: 'totl'" in failure["detail"]
    assert f"recipe.py:{line}" in failure["detail"]
    assert failure["reason"] == "reward_error"
    assert failure["node_id"] == "node-1"
    assert failure["count"] >= 30
    assert "times in a row" in summary["stopped_for"]
    assert summary["dead_letters"] >= 1
    assert "nothing was learned" in summary["learned_nothing"]
    assert why is None or f"recipe.py:{line}" in why.split("\n\n")[1], "in the verdict, first of all"
    said = files.stderr.read_text()
    assert "correct it and start a new run" in said
    assert "Traceback" not in said


def _why(files: RunFiles) -> str | None:
    """What `astraflow why` prints; None when the run had ended before it asked."""
    command = [sys.executable, "-m", "astraflow.cli", "why", "--data-dir", str(files.data_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout if done.returncode == 0 else None


def _recipe(folder: Path) -> tuple[Path, int]:
    """The quickstart with a mistake in its reward, and the line of it."""
    folder.mkdir()
    shipped = ROOT / "recipes" / "quickstart"
    (folder / "recipe.yaml").write_text((shipped / "recipe.yaml").read_text())
    code = (shipped / "recipe.py").read_text().replace('task.data["total"]', 'task.data["totl"]')
    (folder / "recipe.py").write_text(code)
    (line,) = (number for number, text in enumerate(code.splitlines(), start=1) if '"totl"' in text)
    return folder, line
