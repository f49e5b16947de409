"""The manual, executed: in a folder for each page, its files are written and its commands are run, in order."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.manual import COMMANDS, Block, blocks_of
from support.source_tree import REPOSITORY

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
REWARD = "docs/plugins/reward.md"
# Runs of shipped recipes, which other tests do at length, are for the long tier.
PAGES = (
    REWARD,
    pytest.param("docs/tasks/train-my-own-model.md", marks=pytest.mark.ci),
    pytest.param("docs/index.md", marks=pytest.mark.soak),
    pytest.param("docs/tasks/write-an-environment.md", marks=pytest.mark.soak),
)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_the_page_works_in_order(page: str, tmp_path: Path) -> None:
    found = [block for block in blocks_of((REPOSITORY / page).read_text()) if block.kind in ("run", "file")]
    outputs = [perform(block, folder=tmp_path) for block in found]
    if page == REWARD:
        summary = json.loads(outputs[-1].strip().splitlines()[-1])
        assert (summary["steps"], summary["conservation_error"], summary["heldout_n"]) == (2, 0, 8)


def perform(block: Block, *, folder: Path) -> str:
    """Write a block to its file, or run its commands; what they printed."""
    if block.kind == "file":
        path = folder / block.said
        path.parent.mkdir(exist_ok=True)
        path.write_text(block.text)
        return ""
    assert block.language in COMMANDS
    # What a reader runs for minutes is run for a step.
    lines = [
        f"{line} {block.said}" if line.startswith("astraflow dev") else line
        for line in block.text.splitlines()
    ]
    tools = str(Path(sys.executable).parent)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(lines)],
        cwd=folder,
        env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=390,
        check=False,
    )
    assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"
    return done.stdout
