"""Working sessions: one bidirectional stream per node, leases within credits, cancels, versions, drain."""

import asyncio
from pathlib import Path

import grpc
import pytest

from astraflow._status import from_rpc_error
from astraflow.dataflow.v1 import run_pb2, version_pb2
from astraflow.dataflow.v1 import task_service_pb2 as pb
from astraflow.errors import AstraflowError, InvalidArgumentError, PermissionError_
from astraflow.rollout.v1 import engine_load_pb2
from support.dataflow_world import Node, World, served, until
from support.work_stream import Session, soon, working


async def two_leases(session: Session, *, given: int = 2) -> list[str]:
    """The tasks of two leases, after which no further one comes."""
    await session.credits(given, solver=0)
    leases = [await soon(session.leases), await soon(session.leases)]
    await nothing_comes(session)
    return [lease.task.task_id for lease in leases]


async def nothing_comes(session: Session) -> None:
    """No lease for a while."""
    await asyncio.sleep(0.3)
    assert session.leases.empty()


async def test_leases_follow_credits_and_never_exceed_them(world: World) -> None:
    await world.started(dataset="Counting", groups_per_step=8)
    async with working(world) as session:
        first = await two_leases(session)
        assert len({*first, (await session.leased()).task.task_id}) == 3


async def test_leases_that_cross_credits_on_the_wire_are_not_granted_twice(world: World) -> None:
    await world.started(dataset="Counting", groups_per_step=8)
    async with working(world) as session:
        first = await two_leases(session)
        # Sent by a node of two places that had seen one of its two leases: the other takes the place.
        await session.credits(1, leases_received=1, solver=0)
        await nothing_comes(session)
        await session.credits(1, leases_received=2, solver=0)
        assert len({*first, (await soon(session.leases)).task.task_id}) == 3


async def test_a_node_never_holds_more_than_it_joined_for(world: World) -> None:
    await world.started(dataset="Counting", groups_per_step=8)
    await world.node(max_concurrent_tasks=2)
    async with working(world) as session:
        await two_leases(session, given=64)


async def test_work_that_appears_later_reaches_a_waiting_session(world: World) -> None:
    await world.create_run()
    await world.node()
    async with working(world) as session:
        await session.credits(1, solver=0)
        await world.trainer()
        await world.submit("t1")
        assert (await soon(session.leases)).task.task_id == "t1"


async def test_versions_are_announced_at_the_start_and_as_they_come(world: World) -> None:
    trainer, node = await world.started(dataset="Unevaluated")
    async with working(world) as session:
        assert (await soon(session.versions)).version == 0
        await asyncio.sleep(0.05)
        await session.credits(0, solver=0)
        await world.until(lambda now: now.nodes[0].follow_duration.ToMilliseconds() >= 50)
        await node.work(2)
        await trainer.train(1, base_version=0)
        assert (await soon(session.versions)).version == 1


async def test_an_expired_lease_is_cancelled_on_its_node(world: World) -> None:
    await world.started("t1", lease_ttl_s=0.5)
    async with working(world) as session:
        lease = await session.leased()
        cancel = await soon(session.cancels)
        assert (cancel.lease_id, cancel.reason) == (lease.lease_id, "lease_lost")


async def test_renewals_over_the_stream_keep_a_lease_and_name_a_lost_one(world: World) -> None:
    _, node = await world.started("t1", lease_ttl_s=0.6)
    async with working(world) as session:
        lease = await session.leased()
        for _ in range(6):
            await asyncio.sleep(0.2)
            await session.renew(lease.lease_id)
        assert session.cancels.empty()
        await session.renew(node.sealed("gone#1"))
        assert (await soon(session.cancels)).lease_id == node.sealed("gone#1")


async def test_a_failure_over_the_stream_gives_the_task_to_another_node(world: World) -> None:
    await world.started("t1")
    other = await world.node("n2")
    async with working(world) as session:
        lease = await session.leased()
        failure = pb.LeaseFailure(lease_id=lease.lease_id, reason="drain", retryable=True)
        await session.call.write(pb.WorkRequest(failure=failure))
        assert [item.attempt for item in await other.lease(wait_s=10)] == [2]


async def test_a_new_stream_of_the_same_incarnation_goes_on_with_its_leases(world: World) -> None:
    _, node = await world.started("t1")
    async with working(world) as session:
        lease = await session.leased()
        # A lease that is not confirmed goes back with its stream. The answer about the lost one says it was read.
        await session.receipt(lease.lease_id, node.sealed("gone#1"))
        assert (await soon(session.cancels)).lease_id == node.sealed("gone#1")
    async with working(world) as session:
        await session.renew(lease.lease_id, node.sealed("gone#2"))
        assert (await soon(session.cancels)).lease_id == node.sealed("gone#2")
        assert await node.complete(lease) == ["ACCEPTED", "ACCEPTED"]
        assert session.cancels.empty()


async def test_a_finished_run_drains_its_nodes_and_cancels_training(world: World) -> None:
    _, node = await world.started(
        dataset="Counting", evaluation="{every_versions: 0, num_samples: 1, final_samples: 1}"
    )

    async def is_evaluating() -> bool:
        return any(found.fed for found in await world.dataflow.store.evaluations.all("run"))

    await until(is_evaluating)
    async with working(world) as session:
        await session.credits(2, solver=0)
        held = [await soon(session.leases), await soon(session.leases)]
        evaluating = [lease for lease in held if lease.required_versions]
        assert len(evaluating) == 1
        await node.complete(evaluating[0])
        await world.finish()
        cancel = await soon(session.cancels)
        assert cancel.reason == "run_finished"
        await session.credits(2, solver=0)
        final = await soon(session.leases)
        await node.complete(final)
        assert (await soon(session.drains)).reason == "run_finished"
    assert (await world.status()).state == run_pb2.RUN_STATE_FINISHED


async def test_status_shows_what_a_connected_node_reports(world: World) -> None:
    await world.create_run()
    await world.node()
    async with working(world) as session:
        report = pb.Credits(tasks=0, serving_versions={"solver": 3}, tokens_sampled=77, waiting_for="weights")
        await session.call.write(pb.WorkRequest(credits=report))

        await world.until(lambda status: status.nodes[0].tokens == 77)
        node = (await world.status()).nodes[0]
        assert (node.connected, node.waiting_for) == (True, "weights")
        assert dict(node.serving_versions) == {"solver": 3}

    await world.until(lambda status: not status.nodes[0].connected)


async def test_a_nodes_weight_faults_reach_the_list_and_why_and_go_when_it_is_mended(world: World) -> None:
    await world.create_run()
    await world.node()
    faults = [
        version_pb2.WeightFault(policy_id="solver", version=5, tensor="w", tile=3, problem="x" * 2000),
        *(version_pb2.WeightFault(policy_id="solver", version=v, problem="gone") for v in range(40)),
    ]
    async with working(world) as session:
        await session.call.write(pb.WorkRequest(credits=pb.Credits(weight_faults=faults)))
        await world.until(lambda status: len(status.nodes[0].weight_faults) == 16)
        first = (await world.status()).nodes[0].weight_faults[0]
        assert (first.version, first.tensor, first.tile, len(first.problem)) == (5, "w", 3, 512)
        waits = (await world.why()).waits
        assert [wait.policy_id for wait in waits if wait.reason == "weight_fault"] == ["solver"]

        await session.call.write(pb.WorkRequest(credits=pb.Credits()))
        await world.until(lambda status: not status.nodes[0].weight_faults)


async def test_engines_that_hang_reach_the_list_and_why_and_go_when_the_next_one_serves(world: World) -> None:
    await world.create_run()
    await world.node()
    fault = engine_load_pb2.EngineFault(policy_id="solver", engine=2, reason="engine_hung", detail="d" * 1000)
    async with working(world) as session:
        await session.call.write(pb.WorkRequest(credits=pb.Credits(engine_faults=[fault])))
        await world.until(lambda status: len(status.nodes[0].engine_faults) == 1)
        assert len((await world.status()).nodes[0].engine_faults[0].detail) == 512
        (wait,) = [wait for wait in (await world.why()).waits if wait.reason == "engine_hung"]
        assert wait.policy_id == "solver"
        assert wait.detail.startswith("n1, engine 2: ddd")

        await session.call.write(pb.WorkRequest(credits=pb.Credits()))
        await world.until(lambda status: not status.nodes[0].engine_faults)
        assert "engine_hung" not in {wait.reason for wait in (await world.why()).waits}


async def test_a_node_that_stands_still_loses_its_session_and_another_one_is_leased_what_it_had_not_confirmed(
    redis_url: str, tmp_path: Path
) -> None:
    async with served(redis_url, tmp_path, node_silence_s=0.6) as world:
        _, other = await world.started(dataset="Counting", groups_per_step=1, max_staleness=0)
        async with working(world, "n1") as session:
            assert (await soon(session.beats)).number == 1
            await session.leased()
            # It stands still: the connection is open, and nothing comes any more.
            await world.until(lambda status: not any(node.connected for node in status.nodes))
            assert (await soon(session.beats)).number == 2, "it was told that the server lives"
            assert len(await other.lease(1)) == 1


async def refusal(node: Node, *requests: pb.WorkRequest) -> AstraflowError:
    """The typed error with which a stream of these requests ends."""
    call = node.world.speaking(node.credential).open(node.world.client.tasks.Work)
    try:
        for request in requests:
            await call.write(request)
        async with asyncio.timeout(10):
            async for _ in call:
                pass
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    raise AssertionError("the stream was not refused")


def hello(run_id: str = "run", *, node_id: str = "n1", incarnation: int = 1) -> pb.WorkRequest:
    """What opens a session."""
    return pb.WorkRequest(hello=pb.Hello(run_id=run_id, node_id=node_id, incarnation=incarnation))


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        pytest.param([pb.WorkRequest(credits=pb.Credits(tasks=1))], InvalidArgumentError, id="no hello"),
        pytest.param([hello(node_id="stranger")], PermissionError_, id="another node"),
        pytest.param([hello(incarnation=9)], PermissionError_, id="another incarnation"),
        pytest.param([hello("nowhere")], PermissionError_, id="another run"),
        pytest.param([hello(), hello()], InvalidArgumentError, id="a second hello"),
    ],
)
async def test_a_session_that_opens_wrongly_is_refused(
    world: World, requests: list[pb.WorkRequest], expected: type[AstraflowError]
) -> None:
    await world.create_run()
    assert isinstance(await refusal(await world.node(), *requests), expected)
