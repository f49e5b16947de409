"""Leases: who gets a task, when it is taken back, and where it ends when nobody can run it."""

import asyncio

import pytest

from astraflow.rollout.v1.task_pb2 import Lease
from support.dataflow_world import Node, World


async def leased(world: World, **recipe: object) -> tuple[Node, Lease]:
    """A run with version 0, and its node with the only task."""
    _, node = await world.started("t1", **recipe)
    (lease,) = await node.lease()
    return node, lease


async def test_a_lease_lists_what_the_node_must_know(world: World) -> None:
    _, lease = await leased(world)
    assert (lease.run_id, lease.task.task_id, lease.attempt) == ("run", "t1", 1)
    assert (list(lease.members), lease.task.group_size) == ([0, 1], 2)
    assert lease.ttl_duration.ToSeconds() == 20
    assert lease.sampling["solver"].max_new_tokens == 16
    assert not lease.required_versions


async def test_an_expired_lease_is_given_again_with_the_next_attempt_and_the_missing_members(
    world: World,
) -> None:
    node, first = await leased(world, lease_ttl_s=0.5)
    await node.push(node.episode(first, 0))
    second = (await node.lease(wait_s=10))[0]
    assert (second.attempt, list(second.members)) == (2, [1])
    assert await node.renew(first.lease_id) == [first.lease_id]


async def test_a_renewed_lease_does_not_expire(world: World) -> None:
    node, lease = await leased(world, lease_ttl_s=0.6)
    for _ in range(6):
        await asyncio.sleep(0.2)
        assert await node.renew(lease.lease_id) == []
    assert await node.complete(lease) == ["ACCEPTED", "ACCEPTED"]


async def test_a_lease_is_renewed_by_its_holder_only(world: World) -> None:
    _, lease = await leased(world)
    other = await world.node("n2")
    assert await other.renew(lease.lease_id, "nonsense", "t1#9") == [lease.lease_id, "nonsense", "t1#9"]


async def test_a_task_nobody_can_finish_ends_in_the_dead_letter_stream_and_frees_its_credit(
    world: World,
) -> None:
    _, node = await world.started("t1", "t2", max_attempts=2, groups_per_step=1, max_staleness=0)
    (first,) = await node.lease()
    assert await node.fail(first, "workflow_error") is True
    second = (await node.lease(wait_s=10))[0]
    await node.push(node.episode(second, 0))
    assert await node.fail(second, "workflow_error") is False
    (third,) = await node.lease()  # the window holds one group: t1's credit is free again
    assert third.task.task_id == "t2"
    assert (await world.status()).dead_letters == 1
    await world.has_account(dropped={"incomplete": 1})


async def test_a_failure_that_is_not_retryable_is_dead_at_once(world: World) -> None:
    node, lease = await leased(world)
    assert await node.fail(lease, "workflow_error", retryable=False) is False
    assert (await world.status()).dead_letters == 1


@pytest.mark.parametrize("reason", ["drain", "version_unavailable", "missing_capability"])
async def test_a_refusal_that_the_node_cannot_help_costs_no_attempt(world: World, reason: str) -> None:
    _, first = await world.started("t1", max_attempts=1)
    for attempt, node in enumerate([first, await world.node("n2")], start=1):
        (lease,) = await node.lease(wait_s=10)
        assert (lease.attempt, await node.fail(lease, reason, retryable=False)) == (attempt, True)
    assert (await world.status()).dead_letters == 0


async def test_giving_back_a_lost_lease_changes_nothing(world: World) -> None:
    node, first = await leased(world)
    await node.fail(first, "drain")
    (second,) = await node.lease()
    assert await node.fail(first, "workflow_error", retryable=False) is False
    assert await node.renew(second.lease_id) == []


async def test_a_restarted_node_gives_its_leases_back_at_once(world: World) -> None:
    _, first = await leased(world, lease_ttl_s=3600)
    again = await world.node("n1")
    (second,) = await again.lease()
    assert (second.task.task_id, second.attempt) == (first.task.task_id, 2)
    assert (await world.status()).nodes[0].restarts == 1


async def test_nothing_is_leased_before_version_zero(world: World) -> None:
    await world.create_run()
    node = await world.node()
    await world.submit("t1")
    assert (await node.lease_reply()).waiting_for == "no_version"
    assert (await world.waits())["no_version"].stage == "lease"


async def test_a_node_too_far_behind_is_not_given_work_that_would_be_stale(world: World) -> None:
    trainer, node = await world.started("t1", "t2", max_staleness=0, groups_per_step=1)
    node.serving = {"solver": 0}
    await node.work()
    await trainer.train(1, base_version=0)
    assert (await node.lease_reply()).waiting_for == "node_behind"
    node.serving = {"solver": 1}
    assert len(await node.lease()) == 1


async def test_a_waiting_lease_call_wakes_when_a_task_is_submitted(world: World) -> None:
    _, node = await world.started()
    waiting = asyncio.create_task(node.lease(wait_s=20))
    await asyncio.sleep(0.1)
    await world.submit("t1")
    assert [lease.task.task_id for lease in await waiting] == ["t1"]


async def test_submitting_a_task_twice_is_harmless(world: World) -> None:
    _, node = await world.started()
    first, second = await world.submit("t1", "t2"), await world.submit("t2", "t3")
    assert (first.submitted, first.duplicates, second.submitted, second.duplicates) == (2, 0, 1, 1)
    leases = await node.lease(4)
    assert sorted(lease.task.task_id for lease in leases) == ["t1", "t2", "t3"]


async def test_the_data_set_is_asked_only_as_far_as_credits_need(world: World) -> None:
    _, node = await world.started(dataset="Counting", groups_per_step=2, max_staleness=1)
    leases = await node.lease(64)
    assert [lease.task.task_id for lease in leases] == [f"train-{index}" for index in range(4)]
    reply = await node.lease_reply(1)
    assert (list(reply.leases), reply.waiting_for) == ([], "staleness_window")
    await node.complete(leases[0])
    assert (await world.dataflow.store.audits.audit("run")).queued_tasks == 0


async def test_an_exhausted_data_set_is_named_as_the_reason(world: World) -> None:
    _, node = await world.started(dataset="Short", groups_per_step=8)
    assert len(await node.lease(8)) == 3
    assert (await node.lease_reply(1)).waiting_for == "dataset_exhausted"
    assert "dataset_exhausted" in await world.waits()


async def test_a_group_past_its_deadline_is_closed_and_frees_its_credit(world: World) -> None:
    _, node = await world.started("t1", "t2", group_deadline_s=1, groups_per_step=1, max_staleness=0)
    (lease,) = await node.lease()
    await node.push(node.episode(lease, 0))
    (second,) = await node.lease(wait_s=10)
    assert second.task.task_id == "t2"
    await world.has_account(dropped={"expired": 1})


async def test_a_node_one_version_behind_has_a_window_one_step_shorter(world: World) -> None:
    trainer, node = await world.started(dataset="Counting", max_staleness=1, groups_per_step=2)
    await node.work(2)
    await trainer.train(1, base_version=0)
    node.serving = {"solver": 0}
    assert len([lease for lease in await node.lease(16) if not lease.required_versions]) == 2
    assert (await node.lease_reply()).waiting_for == "staleness_window"
    node.serving = {"solver": 1}
    assert len(await node.lease(16)) == 2
