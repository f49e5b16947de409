"""From an installed wheel, in a folder of somebody's: the quickstart is there, and a new recipe is checked and trained.

The folder's files have the names of modules that our processes import; none of them does import them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from astraflow_kit.parent import python
from support.development import ROOT, SMALL
from support.hostile_folder import hostile_folder

pytestmark = [pytest.mark.e2e, pytest.mark.ci, pytest.mark.timeout(400)]


class Installed:
    """A wheel of this tree, unpacked, and a folder to work in."""

    def __init__(self, folder: Path) -> None:
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
        subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
        self.packages, self.folder = folder / "packages", folder / "own"
        self.folder.mkdir()
        hostile_folder(self.folder)
        (wheel,) = folder.glob("*.whl")
        with ZipFile(wheel) as content:
            content.extractall(self.packages)

    def json(self, *arguments: str) -> Any:
        """What `astraflow ARGUMENTS --json` prints."""
        ended = subprocess.run(
            [*python("astraflow.cli", *arguments, "--json")],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(self.packages)},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)


def test_a_wheel_brings_the_quickstart_and_a_new_recipe_that_trains(tmp_path: Path) -> None:
    installed = Installed(tmp_path)
    plan = installed.json("dev", "--dry-run")
    assert plan["recipe"] == str(
        installed.packages / "astraflow" / "shipped_recipes" / "quickstart" / "recipe.yaml"
    )
    installed.json("recipe", "init", "my-task")
    summary = installed.json("dev", "my-task", "--steps", "3", *SMALL)
    assert summary["steps"] == 3
    assert summary["conservation_error"] == 0
    assert (summary["heldout_n"], summary["trajectories"]["evaluated"]) == (8, 16)
    assert Path(summary["data_dir"]).parent == installed.folder / ".astraflow" / "runs"
