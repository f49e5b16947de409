"""Environments in a process of their own, as a node meets them: what is repeated acts once, and whatever goes wrong is
an error of one session.
"""

import asyncio
import re
import secrets
import signal
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from astraflow._status import from_rpc_error
from astraflow.client import AsyncClient, RetryPolicy
from astraflow.environments import EnvironmentFailed
from astraflow.errors import AstraflowError
from astraflow.plugins import Message, MissingCapability, TaskSpec
from astraflow.raas.v1 import environment_service_pb2 as contract
from astraflow.raas.v1.environment_service_pb2_grpc import EnvironmentServiceStub
from astraflow.rollout.v1 import task_pb2
from astraflow_raas.environments.remote import EnvironmentUnavailable, RemoteEnvironment
from support.attack import refusal
from support.environments import ServedEnvironment, served_environment

pytestmark = pytest.mark.integration

TASK = TaskSpec("t1", (Message("user", "Count."),), {"start": 3})


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[ServedEnvironment]:
    """One that serves two sessions, each in a process of its own."""
    async with served_environment(tmp_path, "--workers", "2", goal=10) as served:
        yield served


@pytest.fixture
async def client(service: ServedEnvironment) -> AsyncIterator[AsyncClient]:
    """A node's connection."""
    async with AsyncClient(service.address) as client:
        yield client


def session(
    client: AsyncClient, *, turn_timeout_s: float = 20.0, holder: str = "", incarnation: int = 0
) -> RemoteEnvironment:
    """What one episode acts in."""
    return RemoteEnvironment(
        client, name="Counter", turn_timeout_s=turn_timeout_s, holder=holder, incarnation=incarnation
    )


def said(text: str) -> Message:
    """An action."""
    return Message("assistant", text)


async def test_an_episode_acts_until_the_environment_is_done(client: AsyncClient) -> None:
    counter = session(client)
    assert (await counter.reset(TASK)).messages[0].content == "sum 3"
    first = await counter.step(said("2"))
    assert (first.reward, first.done, first.metrics) == (2.0, False, {"sum": 5.0})
    assert (await counter.step(said("5"))).done
    with pytest.raises(EnvironmentFailed, match=r"turn 3: FAILED_PRECONDITION: .* it is done"):
        await counter.step(said("1"))
    await counter.close()


async def test_a_repeated_turn_answers_again_and_acts_once(client: AsyncClient) -> None:
    stub = EnvironmentServiceStub(client.channel)
    task = task_pb2.Task(task_id="t1", data_json=b'{"start": 3}')
    reset = contract.ResetRequest(session_id=uuid.uuid4().hex, environment="Counter", task=task)
    resets = [await client.call(stub.Reset, reset) for _ in range(2)]
    assert [answer.observation.messages[0].content for answer in resets] == ["sum 3"] * 2
    step = contract.StepRequest(
        session_id=reset.session_id, turn=1, action=task_pb2.Message(role="assistant", content="2")
    )
    answers = await asyncio.gather(*(client.call(stub.Step, step) for _ in range(5)))
    assert {answer.observation.metrics["sum"] for answer in answers} == {5.0}
    step.action.content = "4"
    assert await reason_of(client.call(stub.Step, step)) == "CONFLICT"
    assert await reason_of(client.call(stub.Reset, reset)) == "CONFLICT"
    step.turn = 3
    assert await reason_of(client.call(stub.Step, step)) == "FAILED_PRECONDITION"
    close = contract.CloseRequest(session_id=reset.session_id)
    closed = [await client.call(stub.Close, close) for _ in range(2)]
    assert [(each.turns, each.total_reward, each.terminated) for each in closed] == [(1, 2.0, False)] * 2


async def reason_of(call: object) -> str:
    """The slug by which a call is refused."""
    with pytest.raises(AstraflowError) as refused:
        await call  # type: ignore[misc]
    return refused.value.reason


async def test_a_node_that_is_started_again_ends_the_sessions_of_the_killed_one(client: AsyncClient) -> None:
    node, another = secrets.token_hex(16), secrets.token_hex(16)
    killed = session(client, holder=node, incarnation=1)
    other = session(client, holder=another, incarnation=1)
    for taken in (killed, other):
        await taken.reset(TASK)
    for _ in range(2):  # it holds one of the two places at a time, whatever it held before
        again = session(client, holder=node, incarnation=2)
        async with asyncio.timeout(30):
            await again.reset(TASK)
        assert (await again.step(said("2"))).reward == 2.0
        await again.close()
    with pytest.raises(EnvironmentFailed, match="its holder was started anew"):
        await killed.step(said("2"))
    assert (await other.step(said("2"))).reward == 2.0


# What another caller may know of a session that it was not told: how far it is, who plays what, but no secret.
TAKEOVERS = {
    "the highest incarnation of another holder": (
        "INVALID_ARGUMENT",
        {"holder": "h" * 32, "holder_incarnation": 2**64 - 1},
    ),
    "the highest incarnation of none": ("INVALID_ARGUMENT", {"holder_incarnation": 2**64 - 1}),
    "a higher incarnation of another holder": ("", {"holder": "h" * 32, "holder_incarnation": 2}),
    "a higher incarnation of none": ("", {"holder_incarnation": 2}),
    "a guessed holder": ("INVALID_ARGUMENT", {"holder": "n1", "holder_incarnation": 2**64 - 1}),
    "a short id": ("INVALID_ARGUMENT", {"session_id": "1" * 21}),
}


@pytest.mark.parametrize(("refused", "changes"), TAKEOVERS.values(), ids=TAKEOVERS)
async def test_a_reset_ends_no_session_of_another(
    client: AsyncClient, refused: str, changes: dict[str, Any]
) -> None:
    victim = session(client, holder=secrets.token_hex(16), incarnation=1)
    await victim.reset(TASK)
    named = {"session_id": secrets.token_hex(16), "environment": "Counter"} | changes
    reset = EnvironmentServiceStub(client.channel).Reset
    found = ""
    try:
        await reset(contract.ResetRequest(**named, task=task_pb2.Task(task_id="t1")))
    except grpc.aio.AioRpcError as error:
        found = from_rpc_error(error).reason
    assert found == refused
    assert (await victim.step(said("2"))).metrics == {"sum": 5.0}


async def test_who_was_not_told_a_session_neither_acts_in_it_nor_closes_it(client: AsyncClient) -> None:
    victim, stub = session(client), EnvironmentServiceStub(client.channel)
    await victim.reset(TASK)
    action = task_pb2.Message(role="assistant", content="9")
    for guess in ("", "Counter", "t1", "0" * 32):
        step = contract.StepRequest(session_id=guess, turn=1, action=action)
        assert await reason_of(client.call(stub.Step, step)) == "NOT_FOUND"
        assert (
            await reason_of(client.call(stub.Close, contract.CloseRequest(session_id=guess))) == "NOT_FOUND"
        )
    assert (await victim.step(said("2"))).metrics == {"sum": 5.0}


FAULTS = {
    "raise": "ValueError: the dungeon has no exit .environments.py:",
    "die": r"its worker is gone: it ended .status 7",
    "flood": "2097152 bytes of text, at most 1048576",
    "nan": "reward nan is not finite",
    "hang": "no answer within 1 s",
}


async def test_a_bad_environment_ends_its_own_session_only(
    client: AsyncClient, service: ServedEnvironment
) -> None:
    good = session(client)
    await good.reset(TASK)
    for turn, (word, why) in enumerate(FAULTS.items(), 1):
        bad = session(client, turn_timeout_s=1.0 if word == "hang" else 20.0)
        await bad.reset(TASK)
        with pytest.raises(EnvironmentFailed, match=f"turn 1: PLUGIN_FAILED: .*{why}"):
            await bad.step(said(word))
        assert (await good.step(said("1"))).metrics == {"sum": 3.0 + turn}
        await bad.close()
    await good.close()
    await service.until(lambda now: now["workers"]["ready"] == 2)


async def test_a_deadline_that_no_worker_keeps_is_refused_and_ends_nothing(client: AsyncClient) -> None:
    stub = EnvironmentServiceStub(client.channel)
    task = task_pb2.Task(task_id="t1", data_json=b'{"start": 3}')
    reset = contract.ResetRequest(session_id=uuid.uuid4().hex, environment="Counter", task=task)
    await client.call(stub.Reset, reset)
    step = contract.StepRequest(
        session_id=reset.session_id, turn=1, action=task_pb2.Message(role="assistant", content="2")
    )
    step.deadline_duration.nanos = 1
    refused = await refusal(stub.Step(step, timeout=20))  # past the client's own check
    assert refused is not None
    assert "deadline_duration is 1e-09 s, which must be 1 to 600 s" in refused.message
    step.ClearField("deadline_duration")
    assert (await client.call(stub.Step, step)).observation.metrics["sum"] == 5.0


async def test_a_reset_waits_until_a_session_is_free(client: AsyncClient) -> None:
    first, second, third = session(client), session(client), session(client)
    await first.reset(TASK)
    await second.reset(TASK)
    waiting = asyncio.create_task(third.reset(TASK))
    done, _ = await asyncio.wait((waiting,), timeout=0.5)
    assert not done
    await first.close()
    assert (await waiting).messages
    await second.close()
    await third.close()


async def test_sessions_have_processes_of_their_own_which_are_used_again(client: AsyncClient) -> None:
    pids = []
    for _ in range(2):
        pair = [session(client), session(client)]
        for each in pair:
            await each.reset(TASK)
        shown = [(await each.step(said("1"))).messages[0].content for each in pair]
        pids.append({re.sub(".*pid ", "", text) for text in shown})
        for each in pair:
            await each.close()
    assert pids[0] == pids[1]
    assert len(pids[0]) == 2


async def test_what_is_not_here_is_a_missing_capability(client: AsyncClient) -> None:
    other = RemoteEnvironment(client, name="Dungeon", turn_timeout_s=5.0)
    with pytest.raises(MissingCapability, match=r"environment Dungeon at .* is not served here, but Counter"):
        await other.reset(TASK)
    with pytest.raises(MissingCapability, match="no browser on this machine"):
        await session(client).reset(TaskSpec("t1", (), {"needs": "a browser"}))


async def test_a_killed_service_ends_its_sessions_and_serves_again(tmp_path: Path) -> None:
    async with served_environment(tmp_path) as service:
        port = service.address.rpartition(":")[2]
        async with AsyncClient(service.address) as client:
            counter = session(client, turn_timeout_s=60.0)
            await counter.reset(TASK)
            await service.kill()
            acting = asyncio.create_task(counter.step(said("1")))
            async with served_environment(tmp_path, "--port", port):
                with pytest.raises(EnvironmentFailed, match=r"no such session: .* was started anew"):
                    await acting
                fresh = session(client)
                assert (await fresh.reset(TASK)).messages


async def test_an_address_without_a_service_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astraflow_raas.environments.remote.PATIENCE", RetryPolicy(total_s=0.2))
    async with AsyncClient("127.0.0.1:9") as client:
        with pytest.raises(EnvironmentUnavailable, match=r"at 127.0.0.1:9 does not answer"):
            await session(client).reset(TASK)


async def test_silence_and_turns_are_bounded(tmp_path: Path) -> None:
    options = ("--idle-timeout-s", "0.5", "--max-turns", "2")
    async with served_environment(tmp_path, *options) as service, AsyncClient(service.address) as client:
        counter = session(client)
        await counter.reset(TASK)
        assert [(await counter.step(said("1"))).done for _ in range(2)] == [False, True]
        silent = session(client)
        await counter.close()
        await silent.reset(TASK)
        await service.until(lambda now: now["sessions"]["open"] == 0)
        with pytest.raises(EnvironmentFailed, match=r"nobody called for idle_timeout_s 0.5"):
            await silent.step(said("1"))
        service.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(service.process.wait(), 20) == 0


@pytest.mark.parametrize(
    ("use", "said_"),
    [
        ("support.environments:Dungeon", "has no 'Dungeon'"),
        ("support.environments:served_environment", "is not a Environment"),
        ("no_such_package:Game", "no module named 'no_such_package'"),
    ],
)
async def test_an_environment_that_cannot_be_loaded_ends_the_service(
    tmp_path: Path, use: str, said_: str
) -> None:
    with pytest.raises(AssertionError):
        async with served_environment(tmp_path, use=use):
            raise AssertionError("it serves")
    log = (tmp_path / "environment.log").read_text()
    assert re.search(said_, log)
    assert '"exit_code": 2' in log
