"""What developers in Go and C++ read and run: the programs of the pages, built as theirs are, and the harnesses."""

import asyncio
import base64
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from conformance.completing import completing
from support.dataflow_world import World
from support.source_tree import REPOSITORY

GO = REPOSITORY / "clients" / "go"
CPP = REPOSITORY / "clients" / "cpp"
DOCS = REPOSITORY / "docs" / "clients.md"
GOPATH = {"GO111MODULE": "off", "GOFLAGS": "", "GOPATH": f"{REPOSITORY}/build/gopath:/usr/share/gocode"}
PROJECT = """cmake_minimum_required(VERSION 3.18)
project(stranger CXX)
find_package(astraflow REQUIRED)
add_executable(first first.cpp)
target_link_libraries(first PRIVATE astraflow::client)
"""

pytestmark = [pytest.mark.integration, pytest.mark.ci]
built = {
    "go": pytest.mark.skipif(
        not (shutil.which("go") and (GO / "build" / "evaluate").exists()),
        reason="the Go client is not built here: `make go` needs the packages that clients/go/README.md names",
    ),
    "cpp": pytest.mark.skipif(
        not (shutil.which("cmake") and (CPP / "build" / "prefix").exists()),
        reason="the C++ client is not built here: `make cpp` needs the packages that clients/cpp/README.md names",
    ),
}


@pytest.mark.parametrize(
    ("language", "page", "most_lines", "expected"),
    [
        pytest.param("go", GO / "README.md", 42, ["solver 0", "solver 1"], marks=built["go"], id="go-readme"),
        pytest.param("go", DOCS, 36, ["0", "1"], marks=built["go"], id="go-docs"),
        pytest.param(
            "cpp", CPP / "README.md", 30, ["solver 0", "solver 1"], marks=built["cpp"], id="cpp-readme"
        ),
        pytest.param("cpp", DOCS, 26, ["0", "1"], marks=built["cpp"], id="cpp-docs"),
    ],
)
async def test_a_program_that_a_page_shows_finishes_a_task(
    language: str, page: Path, most_lines: int, expected: list[str], world: World, tmp_path: Path
) -> None:
    program = program_of(page, language)
    assert len(program.splitlines()) <= most_lines
    first = await asyncio.to_thread(build, language, program, tmp_path)
    _, node = await world.started()
    async with completing(node):
        printed = await asyncio.to_thread(run, world, str(first), world.address)
    assert sorted(printed.splitlines()) == expected


@pytest.mark.parametrize("language", [pytest.param(name, marks=mark) for name, mark in built.items()])
async def test_the_evaluation_harness_reports_what_tasks_earned(
    language: str, world: World, tmp_path: Path
) -> None:
    lines = [json.dumps(question(language, number)) for number in range(3)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(lines) + "\n")
    _, node = await world.started()
    async with completing(node):
        harness = REPOSITORY / "clients" / language / "build" / "evaluate"
        printed = await asyncio.to_thread(run, world, str(harness), str(tmp_path / "tasks.jsonl"))
    assert printed.splitlines() == [
        *(f"sum-{n}\t0.500" for n in range(3)),
        "mean reward 0.500 of 3 tasks",
    ]


def question(language: str, number: int) -> dict[str, object]:
    """A line of the harness's file: its own form in Go, a task of the contracts in C++."""
    prompt, answer = f"What is {number} + 1?", str(number + 1)
    if language == "go":
        return {"id": f"sum-{number}", "prompt": prompt, "answer": answer}
    data = base64.b64encode(json.dumps({"answer": answer}).encode()).decode()
    return {"taskId": f"sum-{number}", "messages": [{"role": "user", "content": prompt}], "dataJson": data}


def program_of(page: Path, language: str) -> str:
    """The program that a page shows."""
    (program,) = re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)
    return str(program)


def build(language: str, program: str, folder: Path) -> Path:
    """The executable, built in a folder of its own by what is installed."""
    (folder / f"first.{language}").write_text(program)
    if language == "go":
        ended(["go", "build", "-o", "first", "first.go"], folder, GOPATH)
        return folder / "first"
    (folder / "CMakeLists.txt").write_text(PROJECT)
    ended(["cmake", f"-DCMAKE_PREFIX_PATH={CPP}/build/prefix", "-S", ".", "-B", "out"], folder, {})
    ended(["cmake", "--build", "out"], folder, {})
    return folder / "out" / "first"


def run(world: World, *command: str) -> str:
    """What a program prints."""
    return ended(list(command), REPOSITORY, {"ASTRAFLOW_JOIN": world.address})


def ended(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    """The output of a command that succeeds."""
    finished = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout
