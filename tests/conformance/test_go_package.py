"""What a Go developer reads and runs: the programs of the pages and the evaluation harness."""

import asyncio
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from conformance.completing import completing
from support.dataflow_world import World
from support.source_tree import REPOSITORY

CLIENT = REPOSITORY / "clients" / "go"
ENVIRONMENT = {"GO111MODULE": "off", "GOFLAGS": "", "GOPATH": f"{REPOSITORY}/build/gopath:/usr/share/gocode"}

pytestmark = [
    pytest.mark.integration,
    pytest.mark.ci,
    pytest.mark.skipif(
        not (CLIENT / "build" / "evaluate").exists(),
        reason="the Go client is not built here: `make go` needs the packages that clients/go/README.md names",
    ),
]


@pytest.mark.parametrize(
    ("page", "most_lines", "expected"),
    [
        (CLIENT / "README.md", 42, ["solver 0", "solver 1"]),
        (REPOSITORY / "docs" / "clients.md", 36, ["0", "1"]),
    ],
    ids=["readme", "docs"],
)
async def test_a_program_that_a_page_shows_finishes_a_task(
    page: Path, most_lines: int, expected: list[str], world: World, tmp_path: Path
) -> None:
    program = program_of(page)
    assert len(program.splitlines()) <= most_lines
    (tmp_path / "first.go").write_text(program)
    _, node = await world.started()
    async with completing(node):
        printed = await asyncio.to_thread(run, world, "go", "run", str(tmp_path / "first.go"), world.address)
    assert sorted(printed.splitlines()) == expected


async def test_the_evaluation_harness_reports_what_tasks_earned(world: World, tmp_path: Path) -> None:
    questions = [{"id": f"sum-{n}", "prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(3)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, questions)) + "\n")
    _, node = await world.started()
    async with completing(node):
        harness = str(CLIENT / "build" / "evaluate")
        printed = await asyncio.to_thread(run, world, harness, str(tmp_path / "tasks.jsonl"))
    assert printed.splitlines() == [
        *(f"sum-{n}\t0.500" for n in range(3)),
        "mean reward 0.500 of 3 tasks",
    ]


def program_of(page: Path) -> str:
    """The program that a page shows."""
    (program,) = re.findall(r"```go\n(.*?)```", page.read_text(), re.S)
    return str(program)


def run(world: World, *command: str) -> str:
    """What a program prints."""
    environment = {**os.environ, **ENVIRONMENT, "ASTRAFLOW_JOIN": world.address}
    finished = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout
