"""Roles with a real node, the real server and the workflow of the documentation: who is asked, and what is pushed."""

import asyncio
import json
import sys
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest

from astraflow.plugins import Episode, Group, TaskSpec
from support.dataflow_world import World, until
from support.docs_code import code_of
from support.raas_node import local_node

pytestmark = pytest.mark.integration
STEPS = 6


class Judge(BaseHTTPRequestHandler):
    """An OpenAI-compatible endpoint: busy at first, then of one opinion."""

    asked: ClassVar[list[dict[str, object]]] = []
    keys: ClassVar[set[str]] = set()

    def do_POST(self) -> None:
        """Answer a chat completion."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        Judge.asked.append(body)
        Judge.keys.add(self.headers["authorization"])
        answer = {
            "choices": [{"message": {"role": "assistant", "content": "good"}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 1},
        }
        text = json.dumps(answer).encode()
        self.send_response(503 if len(Judge.asked) == 1 else 200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """What readers copy from the page of workflows, and a filter under which the two policies differ."""
    page = types.ModuleType("roles_page")
    monkeypatch.setitem(sys.modules, page.__name__, page)
    exec(code_of("plugins/workflow.md"), vars(page))  # noqa: S102 - what readers copy

    def half_of_the_verifier_s(group: Group) -> bool:
        return group.role == "solver" or int(group.task.task_id.rpartition("-")[2]) % 2 == 0

    class Judged(page.SolveAndVerify):  # type: ignore[misc, name-defined]
        roles = ("solver", "judge")

        async def run(self, task: TaskSpec, policies: dict) -> Episode:
            solving = page.TrajectoryBuilder(policies["solver"])
            solving.add_prompt(task.messages)
            answer = await solving.generate()
            said = await policies["judge"].chat([page.Message("user", answer.text)])
            return Episode((solving.build(reward=float(said.text == "good")),))

    page.keep, page.Judged = half_of_the_verifier_s, Judged  # type: ignore[attr-defined]
    return page


@pytest.fixture
def judge() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    Judge.asked.clear()
    Judge.keys.clear()
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


async def test_two_policies_of_unlike_acceptance_sample_nothing_that_is_dropped(
    world: World, tmp_path: Path, page: types.ModuleType
) -> None:
    both = ("solver", "verifier")
    work = {"workflow": f"{page.__name__}:SolveAndVerify", "max_concurrent_tasks": 4}
    await world.create_run(dataset="Unevaluated", policies=both, filters=f"[{page.__name__}:keep]", raas=work)
    trainers = [await world.trainer(name) for name in both]

    async def train(number: int) -> None:
        for step in range(1, STEPS + 1):
            await trainers[number].train(step, base_version=step - 1)

    async with local_node(world.address, tmp_path):
        await asyncio.gather(train(0), train(1))
    status = await world.status()
    assert status.trajectories.dropped["no_credit"] <= 0.02 * status.trajectories.ingested
    assert all(item.credit_error == 0 for item in status.policies)
    assert status.trajectories.conservation_error == 0


async def test_an_external_policy_is_asked_by_nodes_with_its_endpoint_and_never_pushed(
    world: World, tmp_path: Path, page: types.ModuleType, judge: str
) -> None:
    overrides = ["policies.judge={model: {external: {model: wise}}, train: false}"]
    work = {"workflow": f"{page.__name__}:Judged"}
    await world.create_run(policies=("solver",), overrides=overrides, raas=work, max_attempts=1)
    trainer = await world.trainer()
    await world.submit("t1", "t2")

    async def refused() -> bool:
        return "no_capable_node" in await world.waits()

    async with local_node(world.address, tmp_path / "without"):
        await until(refused)
        assert list((await world.why("t1")).task.refused_by) == ["node-1"]
        key = tmp_path / "key"
        key.write_text("secret\n")
        options = {"external": (f"judge={judge}",), "external_key_file": (f"judge={key}",)}
        async with local_node(world.address, tmp_path / "with", node_id="node-2", **options):
            batch = await trainer.train(1, base_version=0)
    assert [(item.role, item.reward) for item in batch.items] == [("solver", 1.0)] * 4
    assert {body["model"] for body in Judge.asked} == {"wise"}
    assert len(Judge.asked) == 5, "four episodes, and one attempt that was refused"
    assert Judge.keys == {"Bearer secret"}
    status = await world.status()
    assert {item.policy_id: (item.frozen, item.external) for item in status.policies}["judge"] == (True, True)
    await world.has_account(ingested=4, trained=4, dropped={})
