"""Leases on their way: none is lost between the server and its node, and none is held by two."""

from __future__ import annotations

import asyncio
import hashlib
import random
from pathlib import Path

import pytest

from astraflow.client import AsyncClient, RetryPolicy, typed_stream
from astraflow.dataflow.v1 import admin_service_pb2, run_service_pb2
from astraflow.dataflow.v1 import task_service_pb2 as pb
from astraflow.dataflow.v1.trajectory_service_pb2 import (
    OUTCOME_ACCEPTED_LATE,
    OUTCOME_FENCED,
    OUTCOME_SUPERSEDED,
)
from astraflow.errors import AstraflowError, FencedError, NotFoundError
from astraflow_dataflow.store.tasks import TaskStore
from support.dataflow_world import World, served, until
from support.work_stream import soon, working


async def started(world: World, *node_ids: str, **recipe: object) -> None:
    """A run with version 0 and nodes; leases last a minute, so what comes back sooner was given back."""
    await world.create_run(lease_ttl_s=60, **recipe)
    await world.trainer()
    for node_id in node_ids or ("n1",):
        await world.node(node_id)


async def test_a_lease_that_was_not_confirmed_comes_back_when_the_stream_breaks(world: World) -> None:
    await started(world, "n1", "n2", max_attempts=1)
    await world.submit("t1")
    async with working(world) as session:
        await session.credits(1, solver=0)
        first = await soon(session.leases)
    other = await world.node("n2")
    (lease,) = await other.lease(wait_s=20)
    assert (lease.task.task_id, first.attempt, lease.attempt) == ("t1", 1, 2)  # type: ignore[attr-defined]
    assert await other.complete(lease) == ["ACCEPTED", "ACCEPTED"]


async def test_a_confirmed_lease_stays_with_its_node_over_streams(world: World) -> None:
    await started(world)
    await world.submit("t1")
    node = await world.node()
    async with working(world) as session:
        await session.credits(1, solver=0)
        lease = await soon(session.leases)
        await session.receipt(lease.lease_id)  # type: ignore[attr-defined]
        await session.credits(0)
        await until(lambda: told(world))
    async with working(world, held=[lease.lease_id]) as session:  # type: ignore[attr-defined]
        await session.credits(1, solver=0)
        await until(lambda: told(world, leases=1))
        assert session.cancels.empty()
        assert await node.complete(lease) == ["ACCEPTED", "ACCEPTED"]  # type: ignore[arg-type]


async def told(world: World, *, leases: int = 1) -> bool:
    """Whether the node is connected with that many leases."""
    (node,) = (await world.status()).nodes
    return node.connected and node.leases == leases


async def test_a_node_that_opens_a_session_names_what_it_holds_and_the_rest_comes_back(world: World) -> None:
    await started(world, "n1", "n2", max_attempts=1)
    await world.submit("t1", "t2")
    node, other = await world.node(), await world.node("n2")
    held, lost = await node.lease(2)
    async with working(world, held=[held.lease_id, "t9#1"]) as session:
        assert (await soon(session.cancels)).lease_id == "t9#1"  # type: ignore[arg-type, attr-defined]
        (again,) = await other.lease(2, wait_s=20)
        assert again.task.task_id == lost.task.task_id
        assert await node.complete(held) == ["ACCEPTED", "ACCEPTED"]


async def test_whatever_the_moment_a_stream_breaks_its_leases_come_back(world: World) -> None:
    await started(world, "n1", "n2", max_attempts=1, groups_per_step=8)
    names = [f"t{number}" for number in range(8)]
    await world.submit(*names)
    rng = random.Random(5)
    for _ in range(15):
        async with working(world) as session:
            await session.credits(8, solver=0)
            await asyncio.sleep(rng.random() * 0.02)
    other = await world.node("n2")
    found: set[str] = set()

    async def all_came() -> bool:
        found.update(lease.task.task_id for lease in await other.lease(8, wait_s=0))
        return found == set(names)

    await until(all_came)


async def test_a_newer_stream_of_a_node_takes_the_session_over(world: World) -> None:
    await started(world)
    async with working(world) as older:
        await older.credits(1, solver=0)
        await until(lambda: told(world, leases=0))
        async with working(world) as newer:
            await newer.credits(1, solver=0)
            await world.submit("t1")
            await soon(newer.leases)
            assert (await older.call.code()).name == "FAILED_PRECONDITION"
            assert "another working session" in (await older.call.details() or "")
            assert (await told(world, leases=1)) is True


async def test_a_drain_order_reaches_an_open_session_and_one_that_opens_later(world: World) -> None:
    await started(world)
    await world.submit("t1")
    request = admin_service_pb2.DrainNodeRequest(run_id="run", node_id="n1", reason="maintenance")
    async with working(world) as session:
        await until(lambda: told(world, leases=0))
        reply = await world.client.call(world.client.admin.DrainNode, request)
        assert reply.connected
        assert (await soon(session.drains)).reason == "maintenance"  # type: ignore[arg-type, attr-defined]
        await session.credits(1, solver=0)
    async with working(world) as session:
        assert (await soon(session.drains)).reason == "maintenance"  # type: ignore[arg-type, attr-defined]
        assert session.leases.empty()


async def test_news_of_one_task_makes_one_session_ask_and_not_all(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"n{number}" for number in range(8)]
    await started(world, *names)
    asked: list[str] = []
    lease = TaskStore.lease

    async def counted(self: TaskStore, run_id: str, **arguments: object) -> object:
        asked.append(str(arguments["node_id"]))
        return await lease(self, run_id, **arguments)  # type: ignore[arg-type]

    async with asyncio.TaskGroup() as group:
        done = asyncio.Event()
        leased: asyncio.Queue[str] = asyncio.Queue()

        async def hold(name: str) -> None:
            async with working(world, name) as session:
                await session.credits(4, solver=0)
                while not done.is_set():
                    lease_of = asyncio.create_task(session.leases.get())
                    ended = asyncio.create_task(done.wait())
                    await asyncio.wait({lease_of, ended}, return_when=asyncio.FIRST_COMPLETED)
                    ended.cancel()
                    if lease_of.done():
                        leased.put_nowait(name)
                    lease_of.cancel()

        for name in names:
            group.create_task(hold(name))

        async def all_wait() -> bool:
            nodes = (await world.status()).nodes
            return all(node.connected and node.serving_versions for node in nodes)

        await until(all_wait)
        await asyncio.sleep(0.3)  # the sessions have asked once for their credits and sleep
        monkeypatch.setattr(TaskStore, "lease", counted)
        await world.submit("t1")
        await asyncio.wait_for(leased.get(), 20)
        # A heartbeat of some session may fall in between; before, each of the eight asked at once.
        assert len(asked) <= 4, asked
        for number in range(2, 10):
            await world.submit(f"t{number}")
        done.set()


async def test_a_frozen_node_overwrites_nothing_when_it_goes_on(world: World) -> None:
    await world.create_run(lease_ttl_s=0.5)
    await world.trainer()
    frozen, other = await world.node(), await world.node("n2")
    await world.submit("t1")
    (old,) = await frozen.lease()
    (again,) = await other.lease(wait_s=20)
    await other.push(other.episode(again, 0, reward=0.25))
    # Three leases later it goes on: what is filled stays, what is empty takes its good work.
    outcomes = [
        (await frozen.push(frozen.episode(old, member, reward=1.0))).outcome for member in old.members
    ]
    assert outcomes == [OUTCOME_FENCED, OUTCOME_ACCEPTED_LATE]
    assert await frozen.renew(old.lease_id) == [old.lease_id]
    assert (await other.push(other.episode(again, 1))).outcome == OUTCOME_SUPERSEDED
    rewards = {
        item.trajectory_id: item.reward
        for item in (
            await world.client.call(
                world.client.admin.Why, admin_service_pb2.WhyRequest(run_id="run", task_id="t1")
            )
        ).task.trajectories
        if not item.drop_reason
    }
    assert sorted(rewards.values()) == [0.25, 1.0]
    account = (await world.status()).trajectories
    assert (account.ingested, dict(account.dropped)) == (4, {"fenced": 1, "superseded": 1})
    assert account.conservation_error == 0


async def test_the_work_of_a_node_that_died_is_leased_again_within_one_and_a_half_leases(
    world: World,
) -> None:
    await world.create_run(lease_ttl_s=3)
    await world.trainer()
    dead, other = await world.node(), await world.node("n2")
    await world.submit("t1")
    await dead.lease()
    (again,) = await other.lease(wait_s=20)
    assert again.attempt == 2
    request = admin_service_pb2.WhyRequest(run_id="run", task_id="t1")
    first, second = (await world.client.call(world.client.admin.Why, request)).task.leases
    assert first.outcome == "lease_expired"
    waited_s = second.lease_time.ToMilliseconds() - first.lease_time.ToMilliseconds()
    assert 3000 <= waited_s <= 4500


async def test_a_node_of_an_unknown_run_is_told_so(world: World) -> None:
    await started(world)
    request = run_service_pb2.JoinRunRequest(run_id="nope", node_id="n1", max_concurrent_tasks=1)
    with pytest.raises(NotFoundError, match="no run 'nope'"):
        await world.client.call(world.client.runs.JoinRun, request)
    world.run_id = "nope"
    async with working(world) as session:
        assert (await session.call.code()).name == "NOT_FOUND"


async def test_a_node_is_told_which_stream_error_it_met(world: World) -> None:
    await started(world)
    call = world.client.open(world.client.tasks.Work)
    await call.write(pb.WorkRequest(hello=pb.Hello(run_id="run", node_id="n1", incarnation=99)))
    with pytest.raises(FencedError) as raised:
        async for _ in typed_stream(call):
            pass
    error = raised.value
    assert (error.reason, "incarnation" in error.message) == ("FENCED", True)


async def test_a_wrong_token_and_a_wrong_role_are_told_apart(redis_url: str, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    lines = [
        f"{name} {role} sha256:{hashlib.sha256(name.encode()).hexdigest()}"
        for name, role in [("op", "operator"), ("viewer", "viewer")]
    ]
    tokens.write_text("\n".join(lines) + "\n")
    tokens.chmod(0o600)
    async with served(redis_url, tmp_path, tokens_file=tokens) as world:
        for token, reason in [("wrong", "UNAUTHENTICATED"), ("viewer", "PERMISSION_DENIED")]:
            async with AsyncClient(world.address, token=token, retry=RetryPolicy(total_s=0)) as client:
                request = run_service_pb2.JoinRunRequest(run_id="run", node_id="n1", max_concurrent_tasks=1)
                with pytest.raises(AstraflowError) as raised:
                    await client.call(client.runs.JoinRun, request)
                assert raised.value.reason == reason
