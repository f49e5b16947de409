"""Nodes that send poison are drained, slow ones wait when little is left, and a quota bounds what all of them hold."""

import asyncio
from itertools import count

import pytest

from astraflow.dataflow.v1 import admin_service_pb2 as pb
from astraflow.errors import NotFoundError, PreconditionError
from astraflow.rollout.v1 import task_pb2
from astraflow_dataflow.store.keys import Keys
from support.dataflow_world import Node, World, name_of

NAN = float("nan")
NAMES = (f"bad-{number}" for number in count())


async def poison(node: Node, lease: task_pb2.Lease, times: int) -> None:
    """Push so many episodes that the server refuses."""
    for _ in range(times):
        assert await node.outcome(node.episode(lease, 0, episode_id=next(NAMES), reward=NAN)) == "POISON"


async def listed(world: World, node_id: str = "n1") -> pb.NodeStatus:
    """A node as the status shows it."""
    return next(node for node in (await world.status()).nodes if node.node_id == node_id)


async def undrain(world: World, node_id: str = "n1") -> str:
    """Take a drain back; return what it was for."""
    return (await world.ask(pb.UndrainNodeResponse, node_id=node_id)).drain_reason


async def test_a_node_that_sends_too_much_poison_is_drained_and_others_get_what_it_held(world: World) -> None:
    _, node = await world.started("t1", "t2", max_poison=2, max_attempts=1)
    other = await world.node("n2")
    held = await node.lease(2)
    await poison(node, held[0], 2)
    assert (await listed(world)).drain_reason == ""
    await poison(node, held[0], 1)
    drained = await listed(world)
    assert (drained.drain_reason, drained.poisoned, drained.leases) == ("poison", 3, 0)
    assert sorted(await node.renew(*map(name_of, held))) == ["t1#1", "t2#1"]
    assert (await node.lease_reply()).waiting_for == "draining"
    again = await other.lease(2)
    assert sorted(name_of(lease) for lease in again) == ["t1#2", "t2#2"], (
        "one attempt each, and none was spent"
    )
    await other.complete_all(again)
    wait = (await world.waits())["node_poison"]
    assert "n1 (3 episodes)" in wait.detail
    await world.has_account(ingested=7, ready=4, dropped={"poison": 3})


async def test_what_was_drained_for_poison_stays_drained_until_an_operator_takes_it_back(
    world: World,
) -> None:
    _, node = await world.started("t1", max_poison=1)
    (lease,) = await node.lease()
    await poison(node, lease, 2)
    restarted = await world.node("n1")
    assert (await restarted.lease_reply()).waiting_for == "draining"
    assert [await undrain(world) for _ in range(2)] == ["poison", ""]
    assert "node_poison" not in await world.waits()
    (again,) = await restarted.lease()
    await poison(restarted, again, 1)
    assert (await listed(world)).drain_reason == "", "what it was drained for does not count any more"
    with pytest.raises(NotFoundError, match="n9 has not joined"):
        await undrain(world, "n9")


async def test_twenty_accepted_episodes_make_up_for_one_that_is_poison(world: World) -> None:
    _, node = await world.started(dataset="Counting", group_size=20, max_poison=1)
    for _ in range(3):
        (lease,) = await node.lease()
        await poison(node, lease, 1)
        assert await node.complete(lease) == ["ACCEPTED"] * 20
        assert (await listed(world)).drain_reason == ""
    (lease,) = await node.lease()
    await poison(node, lease, 2)
    assert (await listed(world)).drain_reason == "poison"


async def test_without_a_bound_poison_drains_nobody(world: World) -> None:
    _, node = await world.started("t1", max_poison=0)
    (lease,) = await node.lease()
    await poison(node, lease, 3)
    assert ((await listed(world)).drain_reason, (await listed(world)).poisoned) == ("", 3)


async def test_a_run_holds_no_more_leases_than_its_quota_whatever_its_nodes_ask_for(world: World) -> None:
    _, node = await world.started("t1", "t2", "t3", max_leases=2)
    other = await world.node("n2")
    (first, second) = await node.lease(3)
    assert (await other.lease_reply()).waiting_for == "lease_quota"
    assert "2 leases are out" in (await world.waits())["lease_quota"].detail
    assert (await world.ask(pb.PoolReportResponse)).leasable_tasks == 0
    waiting = asyncio.create_task(other.lease(wait_s=20))
    await node.complete(first)
    assert [lease.task.task_id for lease in await waiting] == ["t3"]
    assert await node.complete(second) == ["ACCEPTED"] * 2


async def paced(world: World, node: Node, *, task_s: int, credits_given: int = 4) -> None:
    """Note of a connected node what it takes, and that it has just finished a task that took so long."""
    fields: dict[str, str | int] = {
        "credits": credits_given,
        "task_ms": 1000 * task_s,
        "done_ms": await world.dataflow.connection.now_ms(),
    }
    await node.report(connected_ms=600_000, fields=fields)


async def test_a_slow_node_gets_nothing_that_a_fast_one_ends_sooner(world: World) -> None:
    _, fast = await world.started("t1", "t2", "t3", "t4", max_staleness=4)
    slow = await world.node("n2")
    await paced(world, fast, task_s=600)
    await paced(world, slow, task_s=2400)
    assert (await slow.lease_reply(4)).waiting_for == "slow_node"
    assert len(await fast.lease(4)) == 4


async def test_a_slow_node_gets_what_the_fast_ones_would_end_later(world: World) -> None:
    _, fast = await world.started(*(f"t{number}" for number in range(10)), max_staleness=9)
    slow = await world.node("n2")
    await paced(world, fast, task_s=600, credits_given=2)
    await paced(world, slow, task_s=2400)
    leases = await slow.lease(4)
    assert len(leases) == 4, "of ten tasks the fast node ends six before the slow one its first"
    assert (await fast.lease_reply(2)).waiting_for == ""


async def test_a_task_that_is_tried_again_goes_to_a_slow_node_too(world: World) -> None:
    _, fast = await world.started("t1")
    slow = await world.node("n2")
    (lease,) = await fast.lease()
    assert await fast.fail(lease, "missing_capability")
    await paced(world, fast, task_s=600)
    await paced(world, slow, task_s=2400)
    assert [again.task.task_id for again in await slow.lease()] == ["t1"]


async def test_the_mean_time_of_a_task_is_of_whole_ones_that_its_node_finished(world: World) -> None:
    _, node = await world.started("t1", "t2")
    (first, second) = await node.lease(2)
    assert (await listed(world)).task_duration.ToMilliseconds() == 0
    await asyncio.sleep(0.05)
    await node.complete(first)
    taken = (await listed(world)).task_duration.ToMilliseconds()
    assert taken >= 50
    await node.fail(second, "drain")
    (again,) = await node.lease()
    await node.complete(again)
    assert (await listed(world)).task_duration.ToMilliseconds() == taken


async def test_ever_new_names_of_nodes_replace_those_that_are_gone_and_none_that_is_at_work(
    world: World,
) -> None:
    _, node = await world.started("t1")
    (lease,) = await node.lease()
    run, known = Keys(world.run_id), world.dataflow.connection
    gone = [f"gone-{number}" for number in range(4095)]
    await known.raw("SADD", run.of("nodes"), *gone)
    for first in ("gone-0", "gone-1"):
        await known.raw("HSET", run.of("node", first), "incarnation", "7 of-another", "connected_until", 1)
    await world.node("new")
    names = {found.node_id for found in (await world.status()).nodes}
    assert {"n1", "new"} < names
    assert len(names) <= 4096
    assert await node.complete(lease) == ["ACCEPTED", "ACCEPTED"]


async def test_a_run_whose_nodes_are_all_at_work_takes_no_further_name(world: World) -> None:
    await world.started("t1")
    run, known = Keys(world.run_id), world.dataflow.connection
    for number in range(4095):
        await known.raw(
            "HSET", run.of("node", f"n-{number}"), "incarnation", "1 own", "connected_until", 10**15
        )
    await known.raw("SADD", run.of("nodes"), *(f"n-{number}" for number in range(4095)))
    with pytest.raises(PreconditionError, match=r"knows 4096 nodes, and all of them .* stop some"):
        await world.node("new")
