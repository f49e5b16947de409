"""A node and the real dataflow server over a real Valkey: the contract as both sides understand it."""

import sys
import types
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis

from astraflow.columns import decode_columns
from astraflow.dataflow.v1.admin_service_pb2 import StatusResponse
from astraflow.rollout.v1 import trajectory_pb2
from astraflow_dataflow.store.keys import Keys
from astraflow_dataflow.store.replies import as_list, as_text
from astraflow_raas.engine.base import EngineFaulty
from astraflow_raas.engine.slots import EngineSlots
from astraflow_raas.push.spool import SpoolLimits
from support.chaos import cut_tail
from support.dataflow_world import Trainer, World, served
from support.docs_code import code_of
from support.raas_node import local_node
from support.scripted_dataflow import eventually
from support.valkey import ValkeyServer

pytestmark = pytest.mark.integration


async def started(world: World, **recipe: object) -> Trainer:
    """A run with an endless data set, and its trainer."""
    await world.create_run(**({"dataset": "Counting"} | recipe))
    return await world.trainer()


def has_full_window(status: StatusResponse) -> bool:
    """Whether as many groups are ready as may be."""
    return status.policies[0].ready_groups == 4


async def test_a_node_feeds_a_trainer_step_after_step(world: World, tmp_path: Path) -> None:
    trainer = await started(world)
    async with local_node(world.address, tmp_path) as local:
        for step in range(1, 4):
            batch = await trainer.train(step, base_version=step - 1)
            assert all(step - 1 - item.min_version <= 1 for item in batch.items)
        bodies = await trainer.fetch(3)
        columns = decode_columns(trajectory_pb2.Trajectory.FromString(bodies[0].body))
        assert columns.loss_mask.any()
        policy = local.node.policies.parts["solver"].policy
        await eventually(lambda: policy.version == 3, what="version 3 serves")
        assert [version for _, version in local.engines["solver"].swaps] == [0, 1, 2, 3]
    (node,) = (await world.status()).nodes
    assert (node.node_id, node.restarts) == ("node-1", 0)
    await world.has_account(trained=12, ingested=node.trajectories)


async def test_a_workflow_of_two_turns_feeds_a_training_step(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = types.ModuleType("workflow_page")
    monkeypatch.setitem(sys.modules, page.__name__, page)
    exec(code_of("plugins/workflow.md"), vars(page))  # noqa: S102 - what readers copy
    workflow = '{use: "workflow_page:Retries", with: {max_turns: 2}}'
    trainer = await started(world, raas={"workflow": workflow})
    async with local_node(world.address, tmp_path) as local:
        await trainer.train(1, base_version=0)
        calls = {call.rid: call for request in local.engines["solver"].requests for call in request}
    for body in await trainer.fetch(1):
        message = trajectory_pb2.Trajectory.FromString(body.body)
        columns = decode_columns(message)
        turns = [(span.role, columns.loss_mask[span.start : span.end]) for span in message.turn_spans]
        assert [role for role, _ in turns] == ["user", "assistant", "user", "assistant"]
        assert [set(mask.tolist()) for _, mask in turns] == [{False}, {True}, {False}, {True}]
        # The second call continued the very tokens of the first, and what stands between them.
        second = tuple(columns.token_ids[: message.turn_spans[3].start].tolist())
        assert second in {call.prompt_ids for call in calls.values()}
    await world.has_account()


async def test_what_a_drain_cannot_finish_goes_to_another_node_at_no_cost(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_GATE", str(tmp_path / "never"))
    held = {"workflow": "support.node_plugins:Gated", "max_concurrent_tasks": 2, "episode_timeout_s": 600}
    await started(world, dataset="Unevaluated", raas=held)
    async with local_node(world.address, tmp_path, node_id="leaving") as local:
        await eventually(lambda: local.node.worker.num_held == 2, what="the node holds two tasks")
        await local.drain(deadline_s=0.2)
        assert local.node.worker.num_held == 0
    connection = world.dataflow.store.connection
    for task_id in ("train-0", "train-1"):
        stored = as_list(await connection.raw("HMGET", Keys("run").of("task", task_id), "state", "tries"))
        assert [as_text(field) for field in stored] == ["retry", "0"]
    leases = await (await world.node("other")).lease(2)
    assert {(lease.task.task_id, lease.attempt) for lease in leases} == {("train-0", 2), ("train-1", 2)}


def holds(status: StatusResponse, leases: int) -> bool:
    """Whether the node has so many leases and wants no more."""
    return (status.nodes[0].leases, status.nodes[0].credits) == (leases, 0)


async def test_a_node_takes_no_more_than_its_engine_can_sample_and_more_when_that_has_room(
    world: World, tmp_path: Path
) -> None:
    recipe = {"groups_per_step": 8, "raas": {"max_concurrent_tasks": 8}}
    await world.create_run(dataset="Unevaluated", **recipe)
    async with local_node(world.address, tmp_path, hardware="a small one", price_per_hour=0.5) as local:
        (engine,) = local.engines.values()
        engine.slots = EngineSlots(4)
        engine.may_answer.clear()
        await world.trainer()
        (node,) = (await world.until(lambda now: holds(now, 3))).nodes
        # Four places and a queue of one, in whole groups of two; the recipe would allow eight tasks.
        assert (node.max_episodes, node.bounded_by, node.max_concurrent_tasks) == (6, "engine_slots", 16)
        assert (node.hardware, node.price_per_hour) == ("a small one", 0.5)
        engine.slots = EngineSlots(64)
        (node,) = (await world.until(lambda now: holds(now, 8))).nodes
        engine.may_answer.set()
    assert node.bounded_by == "recipe"


async def test_an_engine_without_a_load_report_is_counted_and_says_so_to_everybody(
    world: World, tmp_path: Path
) -> None:
    await started(world)
    async with local_node(world.address, tmp_path) as local:
        local.engines["solver"].reported_load = EngineFaulty("it reports token_usage nan")
        (node,) = (await world.until(lambda now: any(load.fault for load in now.nodes[0].engine_loads))).nodes
        (load,) = node.engine_loads
        assert (load.policy_id, load.fault) == ("solver", "it reports token_usage nan")
        assert not load.HasField("kv_usage")
        await world.until(lambda now: now.policies[0].ready_groups == 4)


async def test_every_version_due_is_evaluated_at_exactly_that_version(world: World, tmp_path: Path) -> None:
    trainer = await started(world, evaluation="{every_versions: 1, num_samples: 6, final_samples: 8}")
    async with local_node(world.address, tmp_path):
        await trainer.train(1, base_version=0)
        status = await world.until(lambda now: [e.complete for e in now.evaluations] == [True, True])
    assert [(e.version, e.num_samples) for e in status.evaluations] == [(0, 8), (1, 6)]
    # Read again: the accounts of one status may be older than its evaluations.
    await world.has_account(evaluated=14)


# Redis says how far its disk is from 7.2 on; before that, what is durable is not measured.
async def test_the_spool_empties_as_the_servers_disk_catches_up(world: World, tmp_path: Path) -> None:
    await started(world)
    async with local_node(world.address, tmp_path) as local:
        await world.until(has_full_window)
        await eventually(lambda: not local.node.pusher.num_kept, what="all is durable")
        assert list((tmp_path / "spool" / "node-1").iterdir()) == []


@pytest.fixture
async def world_without_watermark(own_valkey: ValkeyServer, tmp_path: Path) -> AsyncIterator[World]:
    """A server over a Redis of its own that cannot say what is on its disk."""
    with redis.Redis.from_url(own_valkey.url) as client:
        client.config_set("appendfsync", "no")
    async with served(own_valkey.url, tmp_path) as world:
        yield world


async def test_what_redis_lost_is_pushed_again_and_not_sampled_again(
    world_without_watermark: World, own_valkey: ValkeyServer, tmp_path: Path
) -> None:
    world = world_without_watermark
    trainer = await started(world, dataset="Unevaluated")
    keep = SpoolLimits(retain_acked_s=3600.0)
    async with local_node(world.address, tmp_path / "node", limits=keep) as local:
        await world.until(has_full_window)
        calls = sum(len(request) for request in local.engines["solver"].requests)
        own_valkey.kill()
        cut_tail(own_valkey.folder, 4000)
        own_valkey.start()
        await world.until(has_full_window)
        batch = (await trainer.acquire(1)).batch
        await eventually(lambda: local.node.waiting_for == "", what="the node works again")
        assert sum(len(request) for request in local.engines["solver"].requests) == calls == 8
    assert len({item.trajectory_id for item in batch.items}) == 4
    await world.has_account(ingested=8)
