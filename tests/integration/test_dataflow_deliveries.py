"""Leases on their way: none is lost between the server and its node, and none is held by two."""

import asyncio
import random
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest

from astraflow.dataflow.v1.admin_service_pb2 import DrainNodeResponse, StatusResponse
from astraflow_dataflow.run_loop import SWEEP_S
from astraflow_dataflow.store.tasks import TaskStore
from support.dataflow_world import Node, World, until
from support.work_stream import soon, working


async def started(world: World, *task_ids: str, **recipe: object) -> Node:
    """A run's node, and tasks or `t1`; leases last a minute, so what comes back sooner was given back."""
    return (await world.started(*(task_ids or ["t1"]), lease_ttl_s=60, **recipe))[1]


def holding(num_leases: int) -> Callable[[StatusResponse], bool]:
    """Whether the only node is connected with that many leases."""
    return lambda status: [(node.connected, node.leases) for node in status.nodes] == [(True, num_leases)]


async def test_a_lease_that_was_not_confirmed_comes_back_when_the_stream_breaks(world: World) -> None:
    await started(world, max_attempts=1)
    other = await world.node("n2")
    async with working(world) as session:
        first = await session.leased()
    (lease,) = await other.lease(wait_s=20)
    assert (lease.task.task_id, first.attempt, lease.attempt) == ("t1", 1, 2)
    assert await other.complete(lease) == ["ACCEPTED", "ACCEPTED"]


async def test_a_confirmed_lease_stays_with_its_node_over_streams(world: World) -> None:
    node = await started(world)
    async with working(world) as session:
        lease = await session.leased()
        await session.receipt(lease.lease_id)
        await session.credits(0)
        await world.until(holding(1))
    async with working(world, held=[lease.lease_id]) as session:
        await session.credits(1, solver=0)
        await world.until(holding(1))
        assert session.cancels.empty()
        assert await node.complete(lease) == ["ACCEPTED", "ACCEPTED"]


async def test_a_node_that_opens_a_session_names_what_it_holds_and_the_rest_comes_back(world: World) -> None:
    node = await started(world, "t1", "t2", max_attempts=1)
    other = await world.node("n2")
    held, lost = await node.lease(2)
    async with working(world, held=[held.lease_id, "t9#1"]) as session:
        assert (await soon(session.cancels)).lease_id == "t9#1"
        (again,) = await other.lease(2, wait_s=20)
        assert again.task.task_id == lost.task.task_id
        assert await node.complete(held) == ["ACCEPTED", "ACCEPTED"]


async def test_whatever_the_moment_a_stream_breaks_its_leases_come_back(world: World) -> None:
    names = [f"t{number}" for number in range(8)]
    await started(world, *names, max_attempts=1, groups_per_step=8)
    rng = random.Random(5)
    for _ in range(15):
        async with working(world) as session:
            await session.credits(8, solver=0)
            await asyncio.sleep(rng.random() * 0.02)
    other, found = await world.node("n2"), set[str]()

    async def all_came() -> bool:
        found.update(lease.task.task_id for lease in await other.lease(8, wait_s=0))
        return found == set(names)

    await until(all_came)


async def test_a_newer_stream_of_a_node_takes_the_session_over(world: World) -> None:
    await world.started(lease_ttl_s=60)
    async with working(world) as older:
        await older.credits(1, solver=0)
        await world.until(holding(0))
        async with working(world) as newer:
            await newer.credits(1, solver=0)
            await world.submit("t1")
            await soon(newer.leases)
            assert (await older.call.code()).name == "FAILED_PRECONDITION"
            assert "another working session" in (await older.call.details() or "")
            assert holding(1)(await world.status())


async def test_a_drain_order_reaches_an_open_session_and_one_that_opens_later(world: World) -> None:
    await started(world)
    async with working(world) as session:
        await world.until(holding(0))
        assert (await world.ask(DrainNodeResponse, node_id="n1", reason="maintenance")).connected
        assert (await soon(session.drains)).reason == "maintenance"
        await session.credits(1, solver=0)
    async with working(world) as session:
        assert (await soon(session.drains)).reason == "maintenance"
        assert session.leases.empty()


async def test_news_of_one_task_makes_one_session_ask_and_not_all(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.started(lease_ttl_s=60)
    asked: list[str] = []
    lease = TaskStore.lease

    async def counted(self: TaskStore, run_id: str, **arguments: object) -> object:
        asked.append(str(arguments["node_id"]))
        return await lease(self, run_id, **arguments)

    async with AsyncExitStack() as stack:
        sessions = []
        for number in range(1, 9):
            await world.node(f"n{number}")
            sessions.append(await stack.enter_async_context(working(world, f"n{number}")))
            await sessions[-1].credits(4, solver=0)
        await world.until(lambda now: all(node.connected and node.serving_versions for node in now.nodes))
        await asyncio.sleep(0.3)  # the sessions have asked once for their credits and sleep
        monkeypatch.setattr(TaskStore, "lease", counted)
        await world.submit("t1")
        waiting = [asyncio.create_task(session.leases.get()) for session in sessions]
        leased, others = await asyncio.wait(waiting, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        assert leased
        # A heartbeat of some session may fall in between; before, each of the eight asked at once.
        assert len(asked) <= 4, asked
        for other in others:
            other.cancel()


async def test_a_frozen_node_overwrites_nothing_when_it_goes_on(world: World) -> None:
    _, frozen = await world.started("t1", lease_ttl_s=0.5)
    other = await world.node("n2")
    (old,) = await frozen.lease()
    (again,) = await other.lease(wait_s=20)
    await other.push(other.episode(again, 0, reward=0.25))
    # Three leases later it goes on: what is filled stays, what is empty takes its good work.
    assert await frozen.complete(old, reward=1.0) == ["FENCED", "ACCEPTED_LATE"]
    assert await frozen.renew(old.lease_id) == [old.lease_id]
    assert await other.outcome(other.episode(again, 1)) == "SUPERSEDED"
    kept = [item for item in (await world.why("t1")).task.trajectories if not item.drop_reason]
    assert sorted(item.reward for item in kept) == [0.25, 1.0]
    await world.has_account(ingested=4, dropped={"fenced": 1, "superseded": 1})


async def test_the_work_of_a_node_that_died_is_given_back_by_the_first_sweep_after_its_lease(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, dead = await world.started("t1", lease_ttl_s=2)
    other = await world.node("n2")
    await dead.lease()
    end_ms = (await world.why("t1")).task.leases[0].deadline_time.ToMilliseconds()
    sweep, swept = TaskStore.sweep, []

    async def noted(self: TaskStore, run_id: str, *, limit: int) -> tuple[int, int]:
        is_after = await world.dataflow.connection.now_ms() > end_ms
        taken = await sweep(self, run_id, limit=limit)
        swept.append((is_after, taken[0]))
        return taken

    monkeypatch.setattr(TaskStore, "sweep", noted)
    (again,) = await other.lease(wait_s=20)
    assert again.attempt == 2
    assert [num_leases for is_after, num_leases in swept if is_after][:1] in ([1], [])
    assert sum(num_leases for _, num_leases in swept) == 1
    first, second = (await world.why("t1")).task.leases
    assert first.outcome == "lease_expired"
    assert second.lease_time.ToMilliseconds() >= end_ms
    assert SWEEP_S <= 2 / 2, "leases come back within one and a half times their length"
