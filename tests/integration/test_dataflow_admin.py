"""What people ask of a run: why it waits, where a task is, who works on it; and what they order."""

import asyncio
from datetime import timedelta
from functools import partial

import pytest

from astraflow.dataflow.v1 import admin_service_pb2 as pb
from astraflow.dataflow.v1 import trace_pb2
from astraflow.dataflow.v1 import version_service_pb2 as versions_pb
from astraflow.errors import InvalidArgumentError, NotFoundError, PreconditionError
from support.dataflow_world import Node, World

PLACE = trace_pb2.TrajectoryPlace


async def trace(world: World, task_id: str) -> trace_pb2.TaskTrace:
    """The life of a task."""
    return (await world.why(task_id)).task


def places(task: trace_pb2.TaskTrace) -> list[tuple[str, str]]:
    """(place, drop reason) of each trajectory."""
    return [(PLACE.Name(item.place)[17:], item.drop_reason) for item in task.trajectories]


async def test_why_names_stage_since_when_and_what_would_release_it(world: World) -> None:
    await world.create_run()
    first = await world.waits()
    assert {"no_node", "no_trainer"} <= set(first)
    await asyncio.sleep(0.05)
    again = (await world.waits())["no_node"]
    assert again.since_time == first["no_node"].since_time
    assert again.waited_duration.ToNanoseconds() > 0


async def test_a_trace_tells_the_whole_way_of_a_task_to_its_version(world: World) -> None:
    trainer, node = await world.started("t1", groups_per_step=1)
    queued = await trace(world, "t1")
    assert (queued.state, len(queued.leases)) == (trace_pb2.TASK_STATE_QUEUED, 0)
    (lease,) = await node.lease()
    live = await trace(world, "t1")
    (held,) = live.leases
    assert (live.state, held.node_id, held.outcome) == (trace_pb2.TASK_STATE_LEASED, "n1", "")
    assert held.HasField("deadline_time")
    await node.push(node.episode(lease, 0, reward=0.5))
    assert places(await trace(world, "t1")) == [("ASSEMBLING", "")]
    await node.push(node.episode(lease, 1))
    assert places(await trace(world, "t1")) == [("READY", "")] * 2
    batch = await trainer.train(1, base_version=0)
    done = await trace(world, "t1")
    assert (done.state, done.leases[0].outcome) == (trace_pb2.TASK_STATE_DONE, "completed")
    ends = [(episode.member, episode.outcome, episode.node_id) for episode in done.episodes]
    assert ends == [(0, "ACCEPTED", "n1"), (1, "ACCEPTED", "n1")]
    assert places(done) == [("TRAINED", "")] * 2
    first = done.trajectories[0]
    assert (first.batch_id, first.step, first.published_version) == (batch.batch_id, 1, 1)
    assert (first.policy_id, first.reward, first.group_id) == ("solver", 0.5, "t1/solver")
    await trainer.mark_durable(1)
    assert places(await trace(world, "t1")) == [("TRAINED", "")] * 2
    assert done.submit_time.ToMilliseconds() <= done.leases[0].lease_time.ToMilliseconds()


async def test_a_trace_lists_each_attempt_with_its_end_and_each_refusal_with_its_reason(world: World) -> None:
    _, node = await world.started("t1", max_attempts=3)
    other = await world.node("n2")
    (first,) = await node.lease()
    await node.fail(first, "workflow_error")
    (second,) = await other.lease(wait_s=10)
    await other.complete(second)
    await node.push(node.episode(first, 0))
    task = await trace(world, "t1")
    attempts = [(lease.attempt, lease.node_id, lease.outcome) for lease in task.leases]
    assert attempts == [(1, "n1", "workflow_error"), (2, "n2", "completed")]
    assert [episode.outcome for episode in task.episodes] == ["ACCEPTED", "ACCEPTED", "FENCED"]
    assert places(task) == [("READY", "")] * 2 + [("DROPPED", "fenced")]


async def test_a_task_that_was_never_submitted_is_not_found(world: World) -> None:
    await world.started()
    with pytest.raises(NotFoundError, match="never had a task 'nobody'"):
        await world.why("nobody")


async def list_nodes(world: World, **request: object) -> pb.ListNodesResponse:
    """List nodes."""
    return await world.ask(pb.ListNodesResponse, **request)


async def test_nodes_are_listed_in_pages_with_what_they_joined_with(world: World) -> None:
    await world.started()
    facts = {"region": "eu", "pool": "spot", "engines": ["sglang"], "max_concurrent_tasks": 3}
    assert not (await world.join("n2", **facts)).store_grants
    first = await list_nodes(world, page_size=1)
    second = await list_nodes(world, page_size=1, page_token=first.next_page_token)
    assert ([node.node_id for node in first.nodes], second.next_page_token) == (["n1"], "")
    (node,) = second.nodes
    assert {name: getattr(node, name) for name in facts} == facts
    assert (node.incarnation, node.HasField("join_time"), node.drain_reason) == (1, True, "")


async def test_a_node_of_unary_calls_is_listed_with_what_it_serves(world: World) -> None:
    _, node = await world.started()
    for serving in ({"solver": 3}, {"solver": 4}, {}):
        node.serving = serving
        await node.lease_reply()
        (listed,) = (await list_nodes(world)).nodes
        assert dict(listed.serving_versions) == serving


async def test_a_node_that_falls_silent_is_last_seen_when_it_spoke_although_its_stream_is_open(
    world: World,
) -> None:
    _, node = await world.started()
    (before,) = (await list_nodes(world)).nodes
    report = partial(node.report, connected_ms=60_000)
    await report(heard=False)
    (silent,) = (await list_nodes(world)).nodes
    assert (silent.connected, silent.last_seen_time) == (True, before.last_seen_time)
    await report()
    (heard,) = (await list_nodes(world)).nodes
    assert heard.last_seen_time.ToMilliseconds() >= before.last_seen_time.ToMilliseconds()
    assert heard.last_seen_time != before.last_seen_time


async def drain(world: World, node_id: str, reason: str = "") -> pb.DrainNodeResponse:
    """Order a drain."""
    return await world.ask(pb.DrainNodeResponse, node_id=node_id, reason=reason)


async def test_a_node_that_must_drain_gets_nothing_more_until_it_starts_anew(world: World) -> None:
    _, node = await world.started("t1", "t2")
    (lease,) = await node.lease()
    assert (await drain(world, "n1")).leases == 1
    reply = await node.lease_reply()
    assert (list(reply.leases), reply.waiting_for) == ([], "draining")
    assert await node.complete(lease) == ["ACCEPTED", "ACCEPTED"]
    assert (await list_nodes(world)).nodes[0].drain_reason == "operator"
    again = await world.node("n1")
    assert len(await again.lease()) == 1


async def test_only_a_known_node_drains_for_a_reason_that_is_a_slug(world: World) -> None:
    await world.started()
    with pytest.raises(NotFoundError, match="n9 has not joined"):
        await drain(world, "n9")
    with pytest.raises(InvalidArgumentError, match=r"reason is .* which must match"):
        await drain(world, "n1", "Because I say so")


async def bury(world: World, node: Node, *task_ids: str) -> None:
    """Fail tasks for good; the first member of each has come."""
    await world.submit(*task_ids)
    for lease in await node.lease(len(task_ids)):
        await node.push(node.episode(lease, 0))
        await node.fail(lease, "workflow_error", retryable=False)
    await world.until(lambda status: status.trajectories.assembling == 0)


async def test_dead_letters_are_listed_in_pages_with_reason_and_payload(world: World) -> None:
    _, node = await world.started()
    await bury(world, node, "t1", "t2")
    first = await world.dead_letters(page_size=1, include_tasks=True)
    assert (first.total, len(first.dead_letters)) == (2, 1)
    (letter,) = first.dead_letters
    died = (letter.task_id, letter.reason, letter.node_id, letter.attempt)
    assert died == ("t1", "workflow_error", "n1", 1)
    assert (letter.task.task_id, letter.payload_ref) == ("t1", f"af:{{run}}:dead {letter.dead_letter_id}")
    rest = await world.dead_letters(page_token=first.next_page_token)
    assert ([item.task_id for item in rest.dead_letters], rest.next_page_token) == (["t2"], "")
    assert not rest.dead_letters[0].HasField("task")


async def test_a_requeued_task_runs_anew_once_and_every_trajectory_stays_accounted_for(world: World) -> None:
    _, node = await world.started()
    await bury(world, node, "t1")
    (letter,) = (await world.dead_letters()).dead_letters
    assert await world.requeue(letter.dead_letter_id) == (1, 0, 0)
    assert await world.requeue(letter.dead_letter_id) == (0, 1, 0)
    (lease,) = await node.lease(2)
    assert (lease.task.task_id, lease.attempt, list(lease.members)) == ("t1", 2, [0, 1])
    lost = node.episode(lease, 0)
    lost.episode_id = "t1.0.1.n1"  # pushed before the task died: repeated, it fills nothing
    assert (await node.push(lost)).outcome == 3  # DUPLICATE
    assert await node.complete(lease) == ["ACCEPTED", "ACCEPTED"]
    await world.has_account(ingested=3, ready=2, dropped={"incomplete": 1})
    assert places(await trace(world, "t1")) == [("DROPPED", "incomplete"), ("READY", ""), ("READY", "")]


async def test_all_letters_are_requeued_at_once_and_none_of_a_finishing_run(world: World) -> None:
    _, node = await world.started(groups_per_step=4)
    await bury(world, node, "t1", "t2", "t3")
    assert await world.requeue() == (3, 0, 0)
    assert len(await node.lease(4)) == 3
    await world.finish()
    with pytest.raises(PreconditionError, match="takes no tasks"):
        await world.requeue()


async def test_a_requeued_task_may_die_again(world: World) -> None:
    _, node = await world.started(max_attempts=1)
    await bury(world, node, "t1")
    await world.requeue()
    (lease,) = await node.lease()
    assert not await node.fail(lease, "workflow_error")
    assert [item.task_id for item in (await world.dead_letters()).dead_letters] == ["t1"]


async def test_purged_letters_are_gone(world: World) -> None:
    _, node = await world.started()
    await bury(world, node, "t1", "t2")
    (first, _) = (await world.dead_letters()).dead_letters

    async def purge(*letter_ids: str) -> int:
        return (await world.ask(pb.PurgeDeadLettersResponse, dead_letter_ids=letter_ids)).purged

    assert [await purge(first.dead_letter_id), await purge(first.dead_letter_id), await purge()] == [1, 0, 1]
    assert (await world.dead_letters()).total == 0
    assert await world.requeue(first.dead_letter_id) == (0, 1, 0)


async def test_an_id_that_is_no_letter_is_refused_saying_where_ids_are(world: World) -> None:
    await world.started()
    with pytest.raises(InvalidArgumentError, match="ListDeadLetters shows the ids"):
        await world.requeue("t1")


async def test_a_pin_is_kept_listed_and_removed(world: World) -> None:
    await world.started()
    ask = partial(world.ask, policy_id="solver")
    pin = (await ask(versions_pb.PinVersionResponse, reason="baseline")).pin
    again = (await ask(versions_pb.PinVersionResponse, reason="still the baseline")).pin
    (listed,) = (await ask(versions_pb.ListVersionsResponse)).pins
    assert (listed.version, listed.reason) == (0, "still the baseline")
    assert again.pin_time == pin.pin_time
    assert (await ask(versions_pb.UnpinVersionResponse)).was_pinned
    assert not (await ask(versions_pb.UnpinVersionResponse)).was_pinned
    assert not (await ask(versions_pb.ListVersionsResponse)).pins
    with pytest.raises(NotFoundError, match="version 9 of solver is not announced"):
        await ask(versions_pb.PinVersionResponse, version=9)


async def test_the_status_is_streamed_when_it_changes_and_only_then(world: World) -> None:
    _, node = await world.started("t1")
    request = pb.AdminServiceWatchRequest(run_id="run", interval_duration=timedelta(seconds=0.1))
    changes = world.client.stream(world.client.admin.Watch, request)
    first = await anext(changes)
    assert {"state", "run_id", "policies", "nodes"} <= set(first.changed)
    await node.work()
    async with asyncio.timeout(20):
        async for change in changes:
            assert change.changed
            if change.status.trajectories.ready == 2:
                break


async def test_pools_report_their_load_and_what_is_left_to_lease(world: World) -> None:
    _, node = await world.started("t1", "t2", "t3")
    await node.lease()
    await world.nodes["n1"].report(connected_ms=60_000)
    reply = await world.ask(pb.PoolReportResponse)
    (pool,) = reply.pools
    assert (pool.pool, pool.nodes, pool.capacity, pool.leases, reply.leasable_tasks) == ("", 1, 64, 1, 2)
