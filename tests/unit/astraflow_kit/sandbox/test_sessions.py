"""A session that is called off while it starts leaves nothing."""

import asyncio
import time

import psutil
import pytest

from astraflow_kit.sandbox import sessions
from astraflow_kit.sandbox.budget import Budget
from astraflow_kit.sandbox.sessions import start_session
from support.scripted_dataflow import eventually

FAMILY = ("sh", "-c", "sleep 600 & wait")


def descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


async def test_a_start_that_is_called_off_ends_what_was_started_already() -> None:
    before = descendants()
    starting = asyncio.create_task(start_session(*FAMILY, budget=Budget(), stdin=asyncio.subprocess.PIPE))
    while not (shell := [each for each in descendants() if each not in before]):  # noqa: ASYNC110
        await asyncio.sleep(0)
    # Nothing else runs in the loop until the shell has a child, however long that takes: the start is not over yet.
    while not (children := shell[0].children()):
        time.sleep(0.01)  # noqa: ASYNC251
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await eventually(lambda: not any(map(is_alive, [*shell, *children])), what="shell and child are gone")


async def test_an_end_takes_all_of_a_session_and_may_be_called_again() -> None:
    session = await start_session(*FAMILY, budget=Budget())
    shell = psutil.Process(session.leader.pid)
    await eventually(shell.children, what="the shell has a child")
    members = [shell, *shell.children()]
    assert [await session.end(), await session.end()] == [True, True]
    await eventually(lambda: not any(map(is_alive, members)), what="shell and child are gone")


async def test_an_end_that_does_not_come_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_END_S", 0.1)
    elsewhere = "setsid sh -c 'echo $$; exec sleep 600' & wait"
    session = await start_session("sh", "-c", elsewhere, budget=Budget(), stdout=asyncio.subprocess.PIPE)
    assert session.leader.stdout is not None
    outside = psutil.Process(int(await session.leader.stdout.readline()))
    assert await session.end() is False
    outside.kill()
    assert await session.end() is True


async def test_a_session_whose_output_nobody_read_ends_all_the_same() -> None:
    session = await start_session("yes", budget=Budget(), stdout=asyncio.subprocess.PIPE, limit=1000)
    assert session.leader.stdout is not None
    await session.leader.stdout.readline()
    await asyncio.sleep(0.1)  # more than the reader takes is waiting
    async with asyncio.timeout(5):
        await session.end()


async def test_a_session_ends_with_the_wall_time_of_its_budget() -> None:
    session = await start_session(*FAMILY, budget=Budget(wall_s=0.2))
    assert await session.leader.wait() == -9
    await session.end()


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
