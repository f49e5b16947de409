"""docs/plugins/reward.md, executed: blocks with a file name are written, blocks marked `run` are run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "plugins" / "reward.md"
BLOCK = re.compile(r"^```(\w+) (\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.e2e
@pytest.mark.timeout(180)
def test_every_block_of_the_page_works_in_order(tmp_path: Path) -> None:
    outputs = [
        output for block in BLOCK.findall(PAGE.read_text()) for output in _perform(*block, folder=tmp_path)
    ]

    summary = json.loads(outputs[-1].strip().splitlines()[-1])
    assert summary["steps"] == 2
    assert summary["conservation_error"] == 0
    assert summary["heldout_n"] == 8


def _perform(language: str, what: str, text: str, *, folder: Path) -> list[str]:
    if what.startswith("file="):
        path = folder / what.removeprefix("file=")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return []
    assert (language, what) == ("sh", "run"), (
        f"the page has a block this test does not know: {language} {what}"
    )
    return [_run(line, folder=folder) for line in text.splitlines()]


def _run(line: str, *, folder: Path) -> str:
    tools = str(Path(sys.executable).parent)
    done = subprocess.run(
        line.split(),
        cwd=folder,
        env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout
