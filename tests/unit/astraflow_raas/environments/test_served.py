"""A node and an environment service that means harm: it learns nothing that is of use elsewhere, and what it answers
costs one episode and the node nothing.
"""

import math
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest

from astraflow.chat import MAX_MESSAGES, MAX_TEXT_BYTES, MAX_TOOLS
from astraflow.client import Connection
from astraflow.environments import EnvironmentFailed
from astraflow.plugins import Message, TaskSpec
from astraflow.raas.v1 import environment_service_pb2 as contract
from astraflow.raas.v1.environment_service_pb2_grpc import (
    EnvironmentServiceServicer,
    add_EnvironmentServiceServicer_to_server,
)
from astraflow.rollout.v1 import task_pb2
from astraflow_kit.identity.sealing import NODE, Session, issue, new_key, new_lineage
from astraflow_raas.environments.served import ServedEnvironments

TASK = TaskSpec("t1", (Message("user", "Play."),), {})
Shown = Callable[[contract.Observation], object]


@dataclass
class Hostile(EnvironmentServiceServicer):  # type: ignore[misc]
    """Keeps all that it is told, and answers what it likes."""

    show: Shown = lambda _seen: None
    tools: list[contract.Tool] = field(default_factory=list)
    resets: list[contract.ResetRequest] = field(default_factory=list)
    metadata: list[str] = field(default_factory=list)

    async def Reset(self, request: contract.ResetRequest, context: Any) -> contract.ResetResponse:
        self.resets.append(request)
        self.metadata += [key for key, _ in context.invocation_metadata() if key != "user-agent"]
        answer = contract.ResetResponse(tools=self.tools)
        if self.tools:
            self.show(answer.observation)
        return answer

    async def Step(self, request: contract.StepRequest, context: Any) -> contract.StepResponse:
        answer = contract.StepResponse(turn=request.turn)
        self.show(answer.observation)
        return answer

    async def Close(self, request: contract.CloseRequest, context: Any) -> contract.CloseResponse:
        return contract.CloseResponse()


@asynccontextmanager
async def serving(service: Hostile) -> AsyncIterator[Connection]:
    server = grpc.aio.server()
    add_EnvironmentServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield Connection(f"127.0.0.1:{port}")
    finally:
        await server.stop(None)


async def test_a_service_learns_no_name_that_it_could_use_at_another() -> None:
    first, second = Hostile(), Hostile()
    node = Session(speaker=NODE, run_id="run", name="n1", number=1, lineage=new_lineage())
    async with AsyncExitStack() as stack:
        connections = {
            name: await stack.enter_async_context(serving(service))
            for name, service in (("A", first), ("B", second))
        }
        for number in (1, 2):  # a restart of the node is known to each
            served, credential = (
                ServedEnvironments(connections),
                issue(replace(node, number=number), key=new_key()),
            )
            served.speak_as(credential)
            for name in connections:
                await served.open(name, turn_timeout_s=20).reset(TASK)
            await served.stop(deadline_s=1)
    (a,), (b,) = ({request.holder for request in each.resets} for each in (first, second))
    assert a != b
    assert node.lineage not in a + b
    assert [request.holder_incarnation for request in first.resets] == [1, 2]
    assert min(len(a), len(b)) >= 32
    ids = [request.session_id for each in (first, second) for request in each.resets]
    assert len(set(ids)) == 4
    assert min(map(len, ids)) * 6 >= 128
    assert first.metadata == second.metadata == []


ANSWERS: dict[str, tuple[Shown, str]] = {
    "a reward that is no number": (
        lambda seen: setattr(seen, "reward", math.nan),
        "reward nan is not finite",
    ),
    "an endless reward": (lambda seen: setattr(seen, "reward", -math.inf), "reward -inf is not finite"),
    "an endless metric": (lambda seen: seen.metrics.update({"score": math.inf}), r"not so: \['score'\]"),
    "too many messages": (
        lambda seen: seen.messages.extend([task_pb2.Message(role="user")] * (MAX_MESSAGES + 1)),
        "has 65 messages, at most 64",
    ),
    "too much text": (
        lambda seen: seen.messages.add(role="user", content="x" * (MAX_TEXT_BYTES + 1)),
        "1048577 bytes of text",
    ),
    "words of the policy": (lambda seen: seen.messages.add(role="assistant", content="I won."), "speaks as"),
    "tool calls that are no text": (
        lambda seen: seen.messages.add(role="user", tool_calls=[task_pb2.ToolCall(arguments_json=b"\xff")]),
        "can't decode",
    ),
}


@pytest.mark.parametrize(("show", "why"), ANSWERS.values(), ids=ANSWERS)
async def test_an_answer_out_of_bounds_fails_the_episode_by_name(show: Shown, why: str) -> None:
    async with serving(Hostile(show)) as connection:
        served = ServedEnvironments({"A": connection})
        environment = served.open("A", turn_timeout_s=20)
        await environment.reset(TASK)
        with pytest.raises(EnvironmentFailed, match=f"environment A at .*, turn 1: .*{why}"):
            await environment.step(Message("assistant", "hello"))
        await served.stop(deadline_s=1)


async def test_more_tools_than_a_prompt_takes_fail_it_too() -> None:
    tools = [contract.Tool(name=f"t{i}") for i in range(MAX_TOOLS + 1)]
    async with serving(Hostile(tools=tools)) as connection:
        served = ServedEnvironments({"A": connection})
        with pytest.raises(EnvironmentFailed, match="has 129 tools, at most 128"):
            await served.open("A", turn_timeout_s=20).reset(TASK)
        await served.stop(deadline_s=1)
