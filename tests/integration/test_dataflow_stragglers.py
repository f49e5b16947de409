"""Stragglers: a task whose lease is older than most tasks take is leased a second time, and the first copy of each
member is taken.
"""

from functools import partial

import pytest

from astraflow.dataflow.v1 import admin_service_pb2 as pb
from astraflow.rollout.v1 import task_pb2
from astraflow_dataflow.store.keys import Keys
from support.dataflow_world import Node, World, name_of, until, until_equal

HEDGE = "{quantile: 0.5, max_share: 0.5}"
COPY = "t1#1-h"


async def straggling(world: World, *tasks: str, hedge: str = HEDGE) -> tuple[Node, Node]:
    """A node that has held the tasks for longer than tasks take, and another that finds nothing else to do."""
    _, slow = await world.started(*(tasks or ("t1",)), hedge=hedge)
    await raw(world, "LPUSH", "durations", *[1] * 20)
    assert len(await slow.lease(len(tasks) or 1)) == (len(tasks) or 1)
    return slow, await world.node("n2")


async def raw(world: World, command: str, kind: str, *words: str | int) -> None:
    await world.dataflow.connection.raw(command, Keys("run").of(kind), *words)


async def copy_for(node: Node) -> task_pb2.Lease:
    (lease,) = await node.lease(4, wait_s=20)
    assert lease.hedge
    return lease


async def ended_as(world: World, task: str = "t1") -> dict[str, str]:
    """How the leases of a task ended, by id."""
    trace = (await world.ask(pb.WhyResponse, task_id=task)).task
    return {lease.lease_id: lease.outcome for lease in trace.leases}


async def test_the_first_copy_of_each_member_is_taken_and_the_straggler_learns_that_it_is_over(
    world: World,
) -> None:
    slow, other = await straggling(world)
    lease = await copy_for(other)
    assert (name_of(lease), lease.attempt, list(lease.members)) == (COPY, 1, [0, 1])
    assert await slow.outcome(slow.episode(lease, 0, hedge=False)) == "ACCEPTED"
    outcomes = [await other.outcome(other.episode(lease, member, hedge=True)) for member in (0, 1)]
    assert outcomes == ["SUPERSEDED", "ACCEPTED"]
    assert await slow.renew("t1#1") == ["t1#1"]
    assert await slow.outcome(slow.episode(lease, 1, hedge=False)) == "SUPERSEDED"
    assert await ended_as(world) == {"t1#1": "completed", COPY: "completed"}
    await world.has_account(ingested=4, ready=2, dropped={"superseded": 2})


async def test_a_straggler_that_is_first_ends_the_copy(world: World) -> None:
    slow, other = await straggling(world)
    lease = await copy_for(other)
    assert await other.renew(COPY) == []
    assert [await slow.outcome(slow.episode(lease, member, hedge=False)) for member in (0, 1)] == [
        "ACCEPTED"
    ] * 2
    assert await other.renew(COPY) == [COPY]
    await world.has_account(ingested=2, ready=2)


async def test_a_copy_is_for_the_members_that_are_missing(world: World) -> None:
    slow, other = await straggling(world)
    held = task_pb2.Lease(task=task_pb2.Task(task_id="t1"), attempt=1)
    assert await slow.outcome(slow.episode(held, 0)) == "ACCEPTED"
    assert list((await copy_for(other)).members) == [1]


async def test_a_task_has_one_copy_and_never_on_its_own_node_and_copies_are_a_share_of_the_leases(
    world: World,
) -> None:
    slow, other = await straggling(world, "t1", "t2")
    first = await copy_for(other)
    third = await world.node("n3")
    for node in (slow, other, third):
        assert (await node.lease_reply()).leases == []
    assert not await other.fail(first, "workflow_error")
    second = await copy_for(third)
    assert {first.task.task_id, second.task.task_id} == {"t1", "t2"}, "one that had its copy gets no other"
    assert await slow.renew("t1#1", "t2#1") == [], "a copy that fails costs the straggler nothing"


async def test_a_copy_that_is_not_renewed_ends_and_costs_no_attempt(world: World) -> None:
    slow, other = await straggling(world)
    await copy_for(other)
    await raw(world, "ZADD", "copies", 0, "t1")
    await until_equal(partial(ended_as, world), {"t1#1": "", COPY: "lease_expired"})
    assert await other.renew(COPY) == [COPY]
    assert await slow.renew("t1#1") == []


async def test_a_copy_that_never_reached_its_node_is_given_back(world: World) -> None:
    slow, other = await straggling(world)
    await copy_for(other)
    nodes = world.dataflow.store.nodes
    assert await nodes.leave("run", node_id="n2", session="none", undelivered=[COPY]) == 1
    assert await ended_as(world) == {"t1#1": "", COPY: "undelivered"}
    assert await slow.renew("t1#1") == []


async def test_what_a_node_says_it_holds_may_be_a_copy(world: World) -> None:
    _, other = await straggling(world)
    await copy_for(other)
    reconcile = world.dataflow.store.nodes.reconcile
    assert await reconcile("run", node_id="n2", held=[COPY], ttl_s=20) == ([], 0)
    assert await reconcile("run", node_id="n1", held=["t1#1", COPY], ttl_s=20) == ([COPY], 0)


async def test_the_copy_goes_on_when_the_straggler_is_lost(world: World) -> None:
    _, other = await straggling(world)
    lease = await copy_for(other)
    await raw(world, "ZADD", "leases", 0, "t1")
    (again,) = await (await world.node("n3")).lease(wait_s=20)
    assert (name_of(again), again.hedge) == ("t1#2", False)
    outcomes = [await other.outcome(other.episode(lease, member, hedge=True)) for member in (0, 1)]
    assert outcomes == ["ACCEPTED"] * 2
    await world.has_account(ingested=2, ready=2)


async def test_a_copy_that_fails_leaves_its_member_to_the_straggler(world: World) -> None:
    slow, other = await straggling(world)
    lease = await copy_for(other)
    assert await other.outcome(other.episode(lease, 0, hedge=True, failed=True)) == "SUPERSEDED"
    assert await slow.outcome(slow.episode(lease, 0, hedge=False)) == "ACCEPTED"


async def test_a_group_that_closes_ends_its_copy(world: World) -> None:
    _, other = await straggling(world)
    await copy_for(other)
    await raw(world, "ZADD", "open", 0, "t1")
    await until_equal(partial(ended_as, world), {"t1#1": "expired", COPY: "expired"})
    assert await other.renew(COPY) == [COPY]


async def test_copies_are_counted_by_what_became_of_their_episodes(world: World) -> None:
    slow, other = await straggling(world)
    lease = await copy_for(other)
    await slow.push(slow.episode(lease, 0, hedge=False))
    await other.push(other.episode(lease, 0, hedge=True))
    await other.push(other.episode(lease, 1, hedge=True))
    exported = world.dataflow.metrics.render().decode()
    for line in (
        'astraflow_dataflow_leases_total{purpose="hedge"} 1.0',
        'astraflow_dataflow_hedges_total{outcome="superseded"} 1.0',
        'astraflow_dataflow_hedges_total{outcome="accepted"} 1.0',
    ):
        assert line in exported


async def test_lengths_are_counted_by_what_became_of_them(world: World) -> None:
    """A task that is closed early keeps what was quick, so its lengths are counted apart."""
    _, node = await world.started("t1", "t2", min_members=1)
    whole, early = await node.lease(2)
    await node.complete(whole)
    await node.push(node.episode(early, 0, num_response=100))
    await raw(world, "ZADD", "open", 0, early.task.task_id)
    series = (
        'astraflow_dataflow_response_tokens_bucket{closed="%s",le="%s",policy="solver",verdict="ready"} %s'
    )

    async def is_counted() -> bool:
        lines = world.dataflow.metrics.render().decode().splitlines()
        return {series % ("whole", "64.0", "2.0"), series % ("early", "128.0", "1.0")} <= set(lines)

    await until(is_counted)
    assert series % ("early", "64.0", "0.0") in world.dataflow.metrics.render().decode()


@pytest.mark.parametrize("hedge", ["{quantile: 0.4}", "{max_share: 0.6}"])
async def test_settings_out_of_bounds_are_refused(world: World, hedge: str) -> None:
    with pytest.raises(Exception, match="hedge"):
        await world.started("t1", hedge=hedge)
