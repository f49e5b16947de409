"""A child that is alive and answers nothing is named, and replaced after its grace; others are left alone."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from astraflow.client import AsyncClient
from astraflow_kit.ports import free_port
from astraflow_launcher.run import embedded_redis
from astraflow_launcher.run.child_watch import ChildWatch, serves
from astraflow_launcher.run.observer import Observer
from astraflow_launcher.run.processes import Child, ChildSpec, Supervisor
from support.scripted_daemons import IdleProcess, ScriptedNode, serving
from support.scripted_dataflow import eventually

pytestmark = pytest.mark.slow

GRACE_S = 0.4


class Answers:
    """Whether the children answer, as the test says."""

    def __init__(self) -> None:
        self.given: bool | None = True
        self.asked = 0

    async def __call__(self, child: Child) -> bool | None:
        self.asked += 1
        return self.given


@asynccontextmanager
async def watching(watch: ChildWatch) -> AsyncIterator[None]:
    task = asyncio.create_task(watch.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Processor time of every child that has not answered: the sum of what is in the list; a start uses some."""
    seconds = [1.0]

    def cpu_s(_pid: int) -> float:
        seconds.append(seconds[0])
        return sum(seconds)

    monkeypatch.setattr("astraflow_launcher.run.child_watch._cpu_s", cpu_s)
    return seconds


async def test_a_child_that_falls_silent_is_replaced_once_and_the_next_one_has_its_own_time(
    tmp_path: Path, used: list[float]
) -> None:
    answers, watch = Answers(), ChildWatch(grace_s=GRACE_S, look_s=0.02)
    async with Supervisor(stop_grace_s=1) as supervisor:
        process = await IdleProcess.start(supervisor, tmp_path, name="node-1")
        watch.add(process.child, answers)
        async with watching(watch):
            await eventually(lambda: answers.asked > 3, what="it has answered")
            first, answers.given = process.pid, False
            await eventually(lambda: process.child.restarts == 1, what="it is replaced")
            await eventually(lambda: process.child.running and process.pid != first, what="the next one runs")
            looks = len(used)
            await eventually(lambda: len(used) > looks + 5 * GRACE_S / 0.02, what="more than its time")
            assert process.child.restarts == 1, "a start that does something takes as long as it takes"
            assert watch.silent == {}
            answers.given = True


async def test_a_child_that_has_closed_its_port_ends_in_its_own_time(
    tmp_path: Path, used: list[float]
) -> None:
    answers, watch = Answers(), ChildWatch(grace_s=GRACE_S, look_s=0.02)
    async with Supervisor(stop_grace_s=1) as supervisor:
        process = await IdleProcess.start(supervisor, tmp_path, name="trainer-solver")
        watch.add(process.child, answers)
        async with watching(watch):
            await eventually(lambda: answers.asked > 3, what="it has answered")
            looks, answers.given = len(used), None
            await eventually(lambda: len(used) > looks + 5 * GRACE_S / 0.02, what="more than a grace")
            assert (process.child.restarts, watch.silent) == (0, {})


async def test_a_child_that_hangs_before_its_first_answer_is_replaced_too(
    tmp_path: Path, used: list[float]
) -> None:
    answers, watch = Answers(), ChildWatch(grace_s=GRACE_S, look_s=0.02)
    answers.given, used[:] = False, [0.0]
    async with Supervisor(stop_grace_s=1) as supervisor:
        process = await IdleProcess.start(supervisor, tmp_path, name="node-1")
        watch.add(process.child, answers)
        async with watching(watch):
            await eventually(lambda: process.child.restarts == 1, what="it is replaced")


async def test_who_is_not_replaced_is_named_until_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("astraflow_launcher.run.child_watch.SHOWN_S", 0.1)
    answers, watch = Answers(), ChildWatch(grace_s=0.0, look_s=0.02)
    async with Supervisor(stop_grace_s=1) as supervisor, AsyncClient("127.0.0.1:1") as client:
        process = await IdleProcess.start(supervisor, tmp_path, name="node-1")
        observer = Observer(client, "run")
        observer.child_watch = watch
        observer.watch_node("node-1", process.child)
        watch.add(process.child, answers)
        async with watching(watch):
            await eventually(lambda: answers.asked > 3, what="it has answered")
            answers.given = False
            await eventually(lambda: watch.silent, what="it is named")
            await observer.round()
            assert list(observer.observation.silent) == ["node-1"]
            assert observer.observation.unreachable["node-1"].startswith(
                "alive, and has answered nothing for"
            )
            answers.given = True
            await eventually(lambda: not watch.silent, what="it answers again")
            await observer.round()
            assert "node-1" not in observer.observation.unreachable
            assert process.child.restarts == 0


async def test_a_daemon_serves_while_its_event_loop_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("astraflow_launcher.run.child_watch._ANSWER_S", 0.3)
    async with Supervisor(stop_grace_s=1) as supervisor, serving(ScriptedNode(tokens=1)) as address:
        process = await IdleProcess.start(supervisor, tmp_path, name="node-1")
        assert await serves(process.child) is None, "it has not said where"
        process.publish(address)
        assert await serves(process.child), "a daemon without a health service answers that"
        process.publish("127.0.0.1:1")
        assert await serves(process.child) is None, "nobody listens"
        with socket.create_server(("127.0.0.1", 0)) as listener:
            process.publish(f"127.0.0.1:{listener.getsockname()[1]}")
            assert await serves(process.child) is False, "it takes connections and answers nothing"
        async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as listener:
            process.publish(f"127.0.0.1:{listener.sockets[0].getsockname()[1]}")
            assert await serves(process.child) is False, "a call that fails is no closed port"


async def test_a_stopped_redis_answers_nothing_though_it_takes_connections(tmp_path: Path) -> None:
    binary, port = embedded_redis.find_server(), free_port()
    assert binary is not None
    command = embedded_redis.server_command(binary, port=port, folder=tmp_path)
    async with Supervisor(stop_grace_s=1) as supervisor:
        child = await supervisor.start(ChildSpec(name="redis", argv=command, log_path=tmp_path / "redis.log"))
        await asyncio.to_thread(embedded_redis.wait_until_answering, port, folder=tmp_path, timeout_s=30)
        assert await embedded_redis.answers(port)
        assert child.process is not None
        os.kill(child.process.pid, signal.SIGSTOP)
        assert not await embedded_redis.answers(port, timeout_s=0.3)
        os.kill(child.process.pid, signal.SIGCONT)
        assert await embedded_redis.answers(port, timeout_s=30)
