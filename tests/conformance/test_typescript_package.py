"""What a TypeScript developer installs and reads: the package as it is packed, its README and its examples."""

import asyncio
import json
import re
import shutil
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from astraflow import __version__
from astraflow.dataflow.v1 import task_service_pb2 as task_pb
from astraflow.dataflow.v1 import trace_pb2
from astraflow_kit.ports import free_port
from conformance.completing import completing
from support.dataflow_world import World
from support.source_tree import REPOSITORY

CLIENT = REPOSITORY / "clients" / "typescript"
BUILT = CLIENT / "dist" / "conformance" / "driver.js"
TSC = CLIENT / "node_modules" / ".bin" / "tsc"

pytestmark = [
    pytest.mark.integration,
    pytest.mark.ci,
    pytest.mark.skipif(
        not (shutil.which("npm") and BUILT.exists() and TSC.exists()),
        reason="the TypeScript client is not built here: `make typescript` needs node and npm",
    ),
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that has the packed client installed, and what it depends on."""
    folder = tmp_path_factory.mktemp("project")
    command = ["npm", "pack", "--ignore-scripts", "--json", "--pack-destination", str(folder)]
    subprocess.run(command, cwd=CLIENT, check=True, capture_output=True)
    (tarball,) = folder.glob("*.tgz")
    shutil.unpack_archive(tarball, folder / "unpacked", format="gztar")
    modules = folder / "node_modules"
    shutil.copytree(folder / "unpacked" / "package", modules / "@astraflow" / "client")
    for name in ("@bufbuild", "@connectrpc", "@types", "undici-types"):
        (modules / name).symlink_to(CLIENT / "node_modules" / name)
    (folder / "package.json").write_text('{"type": "module"}')
    return folder


def test_the_package_holds_what_its_exports_name_and_no_tests(installed: Path) -> None:
    package = installed / "node_modules" / "@astraflow" / "client"
    exports = json.loads((package / "package.json").read_text())["exports"]
    imports = [f'await import("@astraflow/client{name.removeprefix(".")}");' for name in exports]
    run(installed, "--input-type=module", "--eval", "\n".join(imports))
    assert (package / "dist" / "src" / "index.d.ts").exists()
    assert not [path for path in package.rglob("*") if path.name in ("test", "conformance", "node_modules")]


def test_it_has_the_release_of_the_product_and_its_lock_names_no_registry() -> None:
    assert json.loads((CLIENT / "package.json").read_text())["version"] == __version__
    locked = json.loads((CLIENT / "package-lock.json").read_text())["packages"]
    assert [name for name, facts in locked.items() if "resolved" in facts] == []


def test_its_own_tests_pass() -> None:
    run(CLIENT, "--test", "dist/test/")


@pytest.mark.parametrize(
    ("page", "most_lines", "expected"),
    [(CLIENT / "README.md", 25, "solver 0solver 1"), (REPOSITORY / "docs" / "clients.md", 13, "[ 0, 1 ]")],
    ids=["readme", "docs"],
)
async def test_a_program_that_a_page_shows_finishes_a_task(
    page: Path, most_lines: int, expected: str, installed: Path, world: World
) -> None:
    program = program_of(page)
    assert len(program.splitlines()) <= most_lines
    (installed / "first.ts").write_text(program)
    options = ["--module", "nodenext", "--target", "es2022", "--strict", "--types", "node", "--skipLibCheck"]
    await asyncio.to_thread(run, installed, str(TSC), *options, "first.ts")
    _, node = await world.started()
    async with completing(node):
        printed = await asyncio.to_thread(run, installed, "first.js", world.address)
    assert "".join(sorted(printed.splitlines())) == expected


async def test_the_evaluation_harness_reports_what_tasks_earned(world: World, tmp_path: Path) -> None:
    questions = [{"id": f"sum-{n}", "prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(3)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, questions)) + "\n")
    _, node = await world.started()
    async with completing(node):
        arguments = [world.address, str(tmp_path / "tasks.jsonl"), "2"]
        printed = await asyncio.to_thread(run, CLIENT, "dist/examples/evaluate.js", *arguments)
    assert printed.splitlines()[-1] == "mean reward 0.500 of 3 tasks"
    assert [line.split("\t")[:2] for line in printed.splitlines()[:3]] == [
        [f"sum-{n}", "0.500"] for n in range(3)
    ]


async def test_the_rollout_node_works_on_an_endpoint_and_leaves_in_order(world: World) -> None:
    await world.started(dataset="Empty")
    task = {
        "task_id": "t1",
        "messages": [{"role": "user", "content": "2 + 2"}],
        "data_json": b'{"answer": "4"}',
    }
    with completions() as endpoint:
        arguments = [world.address, endpoint, "tiny"]
        with program("dist/examples/rollout-node.js", *arguments) as node:
            await world.until(lambda status: any(found.connected for found in status.nodes))
            await world.ask(task_pb.SubmitTasksResponse, tasks=[task])
            await world.until(lambda status: status.policies[0].ready_groups == 1)
            traced = (await world.why("t1")).task
            assert traced.state == trace_pb2.TASK_STATE_DONE
            assert [found.reward for found in traced.trajectories] == [1.0, 1.0]
            node.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(node.wait, 20) == 0


async def test_the_status_page_follows_the_run(world: World) -> None:
    await world.create_run()
    port = free_port()
    with program("dist/examples/status-page.js", world.address, str(port)) as page:
        assert page.stdout is not None
        url = await asyncio.to_thread(page.stdout.readline)
        html = await asyncio.to_thread(fetched, url.strip())
        assert "EventSource" in html
        event = await asyncio.to_thread(first_line, f"{url.strip()}/events")
    assert json.loads(event.removeprefix("data: "))["runId"] == "run"


def program_of(page: Path) -> str:
    """The TypeScript program that a page shows."""
    (program,) = re.findall(r"```ts\n(.*?)```", page.read_text(), re.S)
    return str(program)


def run(folder: Path, *arguments: str) -> str:
    """What a node program prints."""
    command = ["node", *arguments]
    finished = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=90, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@contextmanager
def program(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A node program that runs until the block ends."""
    process = subprocess.Popen(["node", *arguments], cwd=CLIENT, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


class Completions(BaseHTTPRequestHandler):
    """An OpenAI-compatible endpoint that always says 4, with its tokens."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert (self.path, asked["return_token_ids"]) == ("/v1/chat/completions", True)
        choice = {
            "message": {"content": "It is 4."},
            "finish_reason": "stop",
            "token_ids": [7, 8, 9],
            "logprobs": {"content": [{"logprob": -0.5}] * 3},
        }
        body = json.dumps({"prompt_token_ids": [1, 2], "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it
        """Say nothing."""


@contextmanager
def completions() -> Iterator[str]:
    """The base URL of such an endpoint."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Completions)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


def fetched(url: str) -> str:
    """The body at `url`."""
    with urllib.request.urlopen(url, timeout=20) as response:
        return str(response.read().decode())


def first_line(url: str) -> str:
    """The first line of an endless body."""
    with urllib.request.urlopen(url, timeout=20) as response:
        return str(response.readline().decode())
