"""Deleting a run: who may, what its trajectories become, that nothing of it is left, and what a crash leaves."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from astraflow.dataflow.v1 import run_service_pb2 as pb
from astraflow.errors import AstraflowError, InvalidArgumentError, NotFoundError, PreconditionError
from astraflow_dataflow.store.keys import Keys
from astraflow_dataflow.store.payloads.inside import call_with
from astraflow_dataflow.store.replies import as_list, as_text
from astraflow_kit.failpoints import read_hits
from support.dataflow_process import DataflowProcess
from support.dataflow_world import World, served, until
from support.work_stream import working

SERVERS_OWN = ("af:schema", "af:incarnation", "af:beat")


async def delete(world: World, run_id: str = "run", *, force: bool = False) -> pb.DeleteRunResponse:
    """Delete a run."""
    return await world.ask(pb.DeleteRunResponse, run_id=run_id, force=force)


async def keys(world: World) -> set[str]:
    """Every key that is not a server's own."""
    found = [await primary.raw("KEYS", "*") for primary in world.dataflow.connection.primaries]
    named = {as_text(key) for keys in found for key in as_list(keys)}
    return {key for key in named if not key.startswith(SERVERS_OWN)}


async def lived(world: World) -> None:
    """A run that trained a step, holds a batch, ready groups, half a group, dead letters, pins and refusals."""
    task_ids = ("t1", "t2", "t3", "t4", "t5", "t6")
    trainer, node = await world.started(*task_ids, max_attempts=1, groups_per_step=1, max_staleness=4)
    leases = await node.lease(5)
    await node.complete_all(leases[:3])
    await node.push(node.episode(leases[3], 0))
    await node.push(node.episode(leases[3], 1, reward=float("nan")))
    await node.fail(leases[4], "workflow_error")
    await trainer.train(1, base_version=0)
    await trainer.acquire(2, base_version=1)


async def test_a_deleted_run_leaves_no_key_and_a_whole_account(world: World) -> None:
    await lived(world)
    before = (await world.status()).trajectories
    assert (before.trained, before.in_batch, before.ready, before.assembling) == (2, 2, 2, 1)
    reply = await delete(world, force=True)
    account = reply.trajectories
    assert account.dropped["run_deleted"] == 5
    assert (account.ingested, account.trained, account.conservation_error) == (before.ingested, 2, 0)
    assert reply.deleted_keys > 20
    assert await keys(world) == set()


async def test_a_run_that_is_worked_on_is_deleted_only_by_force(world: World) -> None:
    await world.started()
    async with working(world):
        await world.until(lambda status: status.nodes[0].connected)
        with pytest.raises(PreconditionError, match=r"node n1 is connected.*force"):
            await delete(world)
    assert (await world.status()).run_id == "run"


async def test_a_run_that_nobody_works_on_needs_no_force(world: World) -> None:
    await world.create_run()
    await delete(world)
    assert await keys(world) == set()


async def test_a_batch_that_a_trainer_holds_is_work(world: World) -> None:
    await world.bound(groups=1, groups_per_step=1)
    await world.nodes["n1"].report(connected_ms=0)
    with pytest.raises(PreconditionError, match="a trainer holds a batch"):
        await delete(world)


async def test_a_trainer_between_two_steps_is_at_work_until_it_releases_its_policy(world: World) -> None:
    await world.create_run()
    trainer = await world.trainer()
    with pytest.raises(PreconditionError, match=r"trainer test of solver called \d s ago; .*force"):
        await delete(world)
    assert (await world.status()).run_id == "run"
    await trainer.release()
    await delete(world)
    assert await keys(world) == set()


async def test_everything_about_a_deleted_run_is_not_found_at_once(world: World) -> None:
    await lived(world)
    node = await world.node()
    await world.submit("t9")
    (lease,) = await node.lease()
    waiting = asyncio.create_task((await world.trainer()).acquire(9, wait_s=20))
    await asyncio.sleep(0.05)
    await delete(world, force=True)
    for call in (world.status(), node.lease(), node.push(node.episode(lease, 0)), world.submit("t8")):
        with pytest.raises(NotFoundError):
            await call
    with pytest.raises(AstraflowError):
        await waiting
    with pytest.raises(NotFoundError):
        await delete(world, force=True)
    assert await keys(world) == set()


async def test_an_open_session_ends_when_its_run_is_deleted(world: World) -> None:
    await world.started()
    async with working(world) as session:
        await session.credits(1, solver=0)
        await world.until(lambda status: status.nodes[0].connected)
        await delete(world, force=True)
        assert (await session.call.code()).name == "NOT_FOUND"
    assert await keys(world) == set()


async def test_another_run_is_left_alone_and_the_name_is_free_again(world: World) -> None:
    await world.create_run(name="run-2")
    await lived(world)
    await delete(world, force=True)
    world.run_id = "run-2"
    assert (await world.status()).run_id == "run-2"
    await lived(world)
    await world.has_account(trained=2)


async def test_what_arrives_at_another_server_leaves_nothing_either(redis_url: str, tmp_path: Path) -> None:
    async with served(redis_url, tmp_path) as one, served(redis_url, tmp_path) as other:
        await one.create_run()
        other.run_id = "run"
        await one.trainer()
        node = await other.node()
        await other.submit("t1")
        (lease,) = await node.lease()
        await delete(one, force=True)
        with pytest.raises(AstraflowError):
            await node.push(node.episode(lease, 0))

        async def forgotten() -> bool:
            return not other.dataflow.registry.loaded()

        await until(forgotten)
        assert await keys(one) == set()


async def test_a_commit_that_is_cancelled_leaves_no_payload_of_a_deleted_run(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, node = await world.started("t1")
    (lease,) = await node.lease()
    await delete(world, force=True)
    store = world.dataflow.store

    async def cancelled_when_redis_answers(*arguments: Any, **named: Any) -> None:
        with pytest.raises(NotFoundError):
            await call_with(*arguments, **named)
        raise asyncio.CancelledError

    monkeypatch.setattr("astraflow_dataflow.store.episodes.commits.call_with", cancelled_when_redis_answers)
    with pytest.raises(asyncio.CancelledError):
        await store.episodes.commit("run", [node.episode(lease, 0)], horizon_s=60.0)
    assert await keys(world) == set()


async def test_a_run_to_delete_is_always_named(world: World) -> None:
    await world.create_run()
    with pytest.raises(InvalidArgumentError, match="run_id is '', which must match"):
        await delete(world, "")


async def listed(world: World) -> list[str]:
    """The runs of the server."""
    return [run.run_id for run in (await world.client.runs.ListRuns(pb.ListRunsRequest())).runs]


async def cut_off(process: DataflowProcess, moment: str) -> None:
    """A server dies at that moment of creating or deleting a run."""
    process.start(failpoints=f"dataflow.{moment}=kill")
    async with process.world() as world:
        if moment.startswith("run_"):
            with pytest.raises(AstraflowError):
                await world.create_run()
        else:
            await lived(world)
            with pytest.raises(AstraflowError):
                await delete(world, force=True)
    process.wait_until_ended()
    assert read_hits(process.failpoints_log)[-1].name == f"dataflow.{moment}"


MOMENTS = {
    "run_listed": False,
    "run_created": True,
    "deleting": False,
    "deleted": False,
    "keys_removed": False,
}
"""Where a server is killed, and whether the run is there once another one began."""


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.parametrize("moment", MOMENTS)
async def test_what_was_cut_off_is_finished_by_the_next_server(
    process: DataflowProcess, redis_url: str, tmp_path: Path, moment: str
) -> None:
    await cut_off(process, moment)
    async with served(redis_url, tmp_path) as world:
        there = ["run"] if MOMENTS[moment] else []
        assert (await listed(world), bool(await keys(world))) == (there, bool(there))
        await world.create_run()
        assert await listed(world) == ["run"]


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.parametrize("moment", ["run_listed", "deleting"])
async def test_what_was_cut_off_is_finished_by_the_next_call(
    process: DataflowProcess, redis_url: str, tmp_path: Path, moment: str
) -> None:
    async with served(redis_url, tmp_path) as other:
        await cut_off(process, moment)
        assert await listed(other) == []
        if moment == "run_listed":
            await other.create_run()
            assert await listed(other) == ["run"]
        await delete(other, force=True)
        assert await keys(other) == set()


async def test_a_deletion_that_is_late_leaves_alone_the_run_that_was_created_since(world: World) -> None:
    """Two servers delete a run; one of them is held up, and goes on when the name is taken again."""
    await world.create_run()
    deletions = world.dataflow.store.deletions
    await deletions.begin("run", force=True, lease_s=60)
    await deletions.delete_keys("run")
    await world.dataflow.registry.forget("run")
    await world.started("t1")
    await deletions._list_as_deleted("run")
    assert await listed(world) == []
    await deletions.delete_keys("run")
    assert (await listed(world), await deletions.deleting()) == (["run"], [])
    assert await keys(world) >= {Keys("run").of(*kind) for kind in (("run",), ("known",), ("task", "t1"))}


async def test_a_run_that_is_being_deleted_is_not_created_beside_it(world: World) -> None:
    await world.create_run()
    await world.dataflow.store.deletions.begin("run", force=True, lease_s=60)
    with pytest.raises(PreconditionError, match="is being deleted; create it again in a moment"):
        await world.create_run()
    assert await listed(world) == []
    await world.dataflow.store.deletions.mend(
        "run"
    )  # as a sweep does: it is listed again by the refused call
    assert await keys(world) == set()
