"""Nobody acts for another node: who joins under which name, and what becomes of work that is not its session's."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from astraflow.errors import (
    FencedError,
    PermissionError_,
    PreconditionError,
    UnauthenticatedError,
)
from astraflow.rollout.v1 import task_pb2, trajectory_pb2
from astraflow_dataflow.store.keys import Keys
from astraflow_kit.identity.sealing import new_lineage
from support.dataflow_world import Node, World, make_episode, outcome_name, served, until_equal
from support.valkey import ValkeyServer
from support.work_stream import soon, working

pytestmark = pytest.mark.integration


async def as_stranger(world: World, node_id: str = "n1") -> Node:
    """Join a name without the credential of who has it."""
    return await dataclasses.replace(world, nodes={}).node(node_id)


async def test_a_newcomer_is_refused_a_name_at_work_with_the_remedy_and_its_holder_works_on(
    world: World,
) -> None:
    _, node = await world.started("t1")
    async with working(world) as session:
        lease = await session.leased()
        with pytest.raises(PreconditionError, match=r"choose another --node-id, or wait .* \d+ s") as refused:
            await as_stranger(world)
        assert refused.value.metadata["reason"] == "name_in_use"
        await session.receipt(lease.lease_id)
        assert await node.complete(lease) == ["ACCEPTED", "ACCEPTED"]
    assert (await world.status()).nodes[0].restarts == 0


async def test_a_silent_name_is_free_and_what_was_leased_to_it_is_not(world: World) -> None:
    _, node = await world.started("t1", "t2")
    first, second = await node.lease(2)
    await node.report(connected_ms=0)
    stranger = await as_stranger(world)
    assert stranger.session.number == node.session.number + 1
    assert stranger.session.lineage != node.session.lineage
    pushed = [await stranger.push(stranger.episode(lease, 0)) for lease in (first, second)]
    assert {(outcome_name(one), one.reason) for one in pushed} == {("REFUSED", "not_lease_holder")}
    with pytest.raises(FencedError, match="joined again"):
        await node.push(node.episode(first, 0))


async def test_a_session_that_never_spoke_holds_no_name(world: World) -> None:
    """As when the answer to JoinRun was lost."""
    await world.create_run()
    await world.node()
    assert (await as_stranger(world)).session.number == 2


async def test_a_restarted_node_shows_what_it_kept_and_goes_on_with_its_leases(world: World) -> None:
    _, node = await world.started("t1")
    (lease,) = await node.lease()
    again = await world.node()
    assert (again.session.number, again.session.lineage) == (2, node.session.lineage)
    # What the process before finished lies on its disk, and is pushed by the next one.
    assert await again.outcome(node.episode(lease, 0)) == "ACCEPTED"
    with pytest.raises(FencedError):
        await node.lease()


async def test_the_same_process_joins_again_as_the_number_it_was_given(world: World) -> None:
    _, node = await world.started("t1")
    (lease,) = await node.lease()
    joined = await world.join("n1", incarnation=1, max_concurrent_tasks=64)
    assert (joined.incarnation, joined.session) == (1, node.credential)
    assert await node.renew(lease.lease_id) == []
    await world.node()
    with pytest.raises(PermissionError_, match="shows the credential of number 2"):
        await world.join("n1", incarnation=1, max_concurrent_tasks=64)


@pytest.mark.parametrize("incarnation", [2, 2**53 - 1, 2**53])
async def test_nobody_says_a_number_that_it_was_not_given(world: World, incarnation: int) -> None:
    _, node = await world.started("t1")
    for asking in (world, dataclasses.replace(world, nodes={})):
        with pytest.raises(PermissionError_):
            await asking.join("n1", incarnation=incarnation, max_concurrent_tasks=64)
    assert len(await node.lease()) == 1, "the name is as usable as before"


async def test_a_node_that_redis_forgot_goes_on_as_who_it_was(
    own_valkey: ValkeyServer, tmp_path: Path
) -> None:
    async with served(own_valkey.url, tmp_path) as world:
        await world.started("t1")
        kept = await world.dataflow.connection.raw("HGET", Keys("run").of("node", "n1"), "incarnation")
        restarted = await world.node()
        (lease,) = await restarted.lease()
        # Its last second is gone: the start of this process, and the lease.
        await world.dataflow.connection.raw("HSET", Keys("run").of("node", "n1"), "incarnation", kept or b"")
        again = await world.join("n1", incarnation=2, max_concurrent_tasks=64)
        assert again.session == restarted.credential
        assert await restarted.complete(lease) == ["ACCEPTED", "ACCEPTED"]


async def test_a_key_that_redis_lost_is_the_one_it_was(world: World) -> None:
    await world.started()
    context = await world.dataflow.registry.get("run")
    await world.dataflow.connection.raw("HDEL", Keys("run").of("run"), "seal_key")
    before = context.seal_key
    await world.dataflow.registry.look_again(world.dataflow.connection.home("run"))
    assert await world.dataflow.connection.raw("HGET", Keys("run").of("run"), "seal_key") == before.encode()


async def test_who_was_followed_is_fenced_within_moments_also_in_an_open_push_stream(world: World) -> None:
    _, node = await world.started("t1")
    (lease,) = await node.lease()
    assert await node.outcome(node.episode(lease, 0)) == "ACCEPTED"
    await world.node()

    async def pushed() -> str:
        try:
            return outcome_name((await node.pack(node.episode(lease, 1)))[0])
        except FencedError as error:
            return error.metadata["reason"]

    await until_equal(pushed, "session_ended")


Push = Callable[[Node, task_pb2.Lease], trajectory_pb2.Episode]
LIES: dict[str, tuple[Push, str]] = {
    "no lease": (lambda node, lease: node.episode(lease, 0, lease_id="none"), "not_lease_holder"),
    "a lease as Redis calls it": (
        lambda node, lease: node.episode(lease, 0, lease_id="t1#1"),
        "not_lease_holder",
    ),
    "a lease of another task": (
        lambda node, lease: node.episode(lease, 0, lease_id=node.lease_id("t2")),
        "not_lease_holder",
    ),
    "another attempt": (
        lambda node, lease: node.episode(lease, 0, attempt=7, lease_id=lease.lease_id),
        "unknown_attempt",
    ),
    "a copy that is none": (
        lambda node, lease: node.episode(lease, 0, hedge=True, lease_id=lease.lease_id),
        "unknown_attempt",
    ),
    "another node": (lambda node, lease: node.episode(lease, 0, node_id="n2"), "wrong_session"),
    "a node that never joined": (lambda node, lease: node.episode(lease, 0, node_id="n9"), "wrong_session"),
    "another run": (lambda node, lease: node.episode(lease, 0, run_id="else"), "wrong_session"),
}


@pytest.mark.parametrize("lie", LIES)
async def test_an_episode_that_was_not_leased_to_its_session_is_refused_and_touches_nobody(
    world: World, lie: str
) -> None:
    make, reason = LIES[lie]
    _, node = await world.started("t1", "t2", max_poison=1)
    victim = await world.node("n2")
    (lease,) = await node.lease()
    (other,) = await victim.lease()
    results = [
        await node.push(make(node, lease)),
        *await node.pack(make(node, lease), node.episode(lease, 1)),
    ]
    assert [(outcome_name(one), one.reason) for one in results] == [
        ("REFUSED", reason), ("REFUSED", reason), ("ACCEPTED", ""),
    ]  # fmt: skip
    assert results[0].detail, "it says what to do"
    # The same as poison, many times: the node it names is not drained for it.
    for _ in range(4):
        await node.push(make(node, task_pb2.Lease.FromString(lease.SerializeToString())))
    listed = {one.node_id: one for one in (await world.status()).nodes}
    assert [(one.poisoned, one.drain_reason) for one in listed.values()] == [(0, ""), (0, "")]
    assert (listed["n1"].refused, listed["n1"].refused_for, listed["n2"].refused) == (6, reason, 0)
    wait = (await world.waits())["node_refused"]
    assert f"n1 (6 episodes, {reason})" in wait.detail
    line = f'astraflow_dataflow_refused_episodes_total{{reason="{reason}"}} 6.0'
    assert line in world.dataflow.metrics.render().decode()
    assert await victim.complete(other) == ["ACCEPTED", "ACCEPTED"]
    await world.has_account(ingested=3)


async def steal(world: World, thief: Node, lease: task_pb2.Lease) -> list[str]:
    """What is answered to the members of another's lease, as the holder would push them, with all the luck."""
    stolen = [
        make_episode(
            run_id=world.run_id, task_id=lease.task.task_id, member=member, node_id=name, reward=1e6,
            lease_id=lease_id, episode_id=f"stolen-{member}-{name}-{number}",
        )
        for member in lease.members
        for name in ("n1", "thief")
        for number, lease_id in enumerate((lease.lease_id, "t1#1", f"t1#1.{'A' * 24}"))
    ]  # fmt: skip
    return [outcome_name(result) for result in await thief.pack(*stolen)]


async def test_what_another_holds_cannot_be_pushed_failed_or_kept_by_anybody_else(world: World) -> None:
    _, node = await world.started("t1")
    thief = await world.node("thief")
    (lease,) = await node.lease()
    assert set(await steal(world, thief, lease)) == {"REFUSED"}
    with pytest.raises(PermissionError_, match="was not given to node thief") as refused:
        await thief.fail(lease, "workflow_error", retryable=False)
    assert refused.value.metadata["reason"] == "not_lease_holder"
    assert await thief.renew(lease.lease_id) == [lease.lease_id]
    assert (await world.dead_letters()).dead_letters == []
    assert await node.complete(lease) == ["ACCEPTED", "ACCEPTED"]


async def test_a_stream_renews_and_holds_what_is_its_own_alone(world: World) -> None:
    _, node = await world.started("t1")
    await world.node("thief")
    (lease,) = await node.lease()
    async with working(world, "thief", held=[lease.lease_id]) as session:
        assert (await soon(session.cancels)).lease_id == lease.lease_id
        await session.renew(lease.lease_id)
        assert (await soon(session.cancels)).lease_id == lease.lease_id
    assert await node.complete(lease) == ["ACCEPTED", "ACCEPTED"]


FORGERIES: dict[str, Callable[[Node], str]] = {
    "none": lambda node: "",
    "garbled": lambda node: node.credential[:-1],
    "its name changed": lambda node: node.credential.replace("/n1/", "/n2/"),
    "its lineage changed": lambda node: node.credential.replace(node.session.lineage, new_lineage()),
}
CALLS: dict[str, Callable[[Node], Awaitable[object]]] = {
    "lease": lambda node: node.lease(1, wait_s=0),
    "renew": lambda node: node.renew("x"),
    "push": lambda node: node.push(make_episode(run_id="run", task_id="t1", member=0, lease_id="x")),
    "stream": lambda node: node.pack(make_episode(run_id="run", task_id="t1", member=0, lease_id="x")),
    "fail": lambda node: node.fail(task_pb2.Lease(lease_id="x"), "drain"),
}


@pytest.mark.parametrize("call", CALLS)
async def test_who_proves_nothing_is_refused_before_anything_else(world: World, call: str) -> None:
    _, node = await world.started("t1")
    for forge in FORGERIES.values():
        liar = dataclasses.replace(node, credential=forge(node))
        with pytest.raises(UnauthenticatedError) as refused:
            await CALLS[call](liar)
        assert refused.value.metadata["reason"] in ("no_session", "wrong_session")
    exported = world.dataflow.metrics.render().decode()
    assert 'astraflow_rpcs_refused_total{reason="UNAUTHENTICATED",why="wrong_session"} 3.0' in exported


async def test_a_credential_of_another_run_is_none_here(world: World) -> None:
    await world.create_run(name="other")
    foreign = await world.node()
    await world.started("t1")
    liar = dataclasses.replace(foreign, world=world)
    for name in ("lease", "renew", "fail"):
        with pytest.raises(PermissionError_) as refused:
            await CALLS[name](liar)
        assert refused.value.metadata["reason"] == "wrong_session"
    result = await liar.push(make_episode(run_id="run", task_id="t1", member=0, lease_id="x"))
    assert (outcome_name(result), result.reason) == ("REFUSED", "wrong_session")


async def test_a_push_has_no_redis_command_of_its_own_for_its_session(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, node = await world.started(*map(str, range(12)), max_staleness=8)
    nodes = world.dataflow.store.nodes
    look = AsyncMock(side_effect=nodes.has_ended)
    monkeypatch.setattr(nodes, "has_ended", look)

    began_s = asyncio.get_running_loop().time()
    await node.complete_all(await node.lease(12))
    within = 1 + int((asyncio.get_running_loop().time() - began_s) / 2.0)
    assert 1 <= look.await_count <= within + 1, "one look in two seconds, whatever is pushed"
