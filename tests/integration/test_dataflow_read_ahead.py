"""A batch that is read ahead: bound while the step before is in hand, and only for the step that was reckoned with."""

import asyncio

import pytest

from astraflow import errors
from astraflow.dataflow.v1 import batch_pb2
from astraflow.dataflow.v1 import run_service_pb2 as runs
from astraflow.dataflow.v1.batch_service_pb2 import (
    BATCH_STAGE_INTENT,
    BATCH_STAGE_SKIPPED,
    BATCH_STAGE_TRAINED,
    VOID_ACTION_DISCARD,
    VOID_ACTION_RETURN,
    AcquireBatchResponse,
    RenewBatchResponse,
)
from astraflow.recipe.file import parse_recipe
from support.dataflow_world import Node, Trainer, World

pytestmark = pytest.mark.integration


async def two_batches(
    world: World, **recipe: object
) -> tuple[Trainer, Node, batch_pb2.Batch, AcquireBatchResponse]:
    """A trainer with the batch of step 1 in hand and that of step 2 read ahead."""
    trainer, node, batch = await world.bound(groups=4, **recipe)
    ahead = await trainer.read_ahead(2)
    return trainer, node, batch, ahead


def tasks(batch: batch_pb2.Batch) -> set[str]:
    return {item.task_id for item in batch.items}


async def test_the_batch_after_the_one_in_hand_is_bound_fetched_and_kept(world: World) -> None:
    trainer, _, batch, ahead = await two_batches(world)
    assert (ahead.batch.step, ahead.batch.base_version, len(ahead.batch.items)) == (2, 1, 4)
    assert not tasks(batch) & tasks(ahead.batch)
    assert (await trainer.read_ahead(2)).batch == ahead.batch
    assert len(await trainer.fetch(2)) == 4
    await trainer._ask(RenewBatchResponse, step=2)
    await world.has_account(in_batch=8, ready=0)
    await trainer.ack(batch, BATCH_STAGE_TRAINED)
    await trainer.publish(version=1, step=1)
    assert (await trainer.acquire(2, base_version=1)).batch == ahead.batch
    await trainer.ack(ahead.batch, BATCH_STAGE_TRAINED)
    await world.has_account(trained=8, in_batch=0, ready=0)


@pytest.mark.parametrize("stage", [BATCH_STAGE_INTENT, BATCH_STAGE_SKIPPED])
async def test_nothing_is_recorded_of_it_before_its_step_begins(world: World, stage: int) -> None:
    trainer, _, batch, ahead = await two_batches(world)
    with pytest.raises(errors.PreconditionError, match="acquire step 2 for itself"):
        await trainer.ack(ahead.batch, stage)
    with pytest.raises(errors.InvalidArgumentError, match="the last finished step is 0"):
        await trainer.acquire(2, base_version=1)
    await trainer.ack(batch, BATCH_STAGE_TRAINED)
    # The step before is over, but nobody has said from which version this one starts.
    with pytest.raises(errors.PreconditionError, match="read ahead"):
        await trainer.ack(ahead.batch, stage)
    await trainer.acquire(2, base_version=1)
    await trainer.ack(ahead.batch, stage)


async def test_its_step_waits_until_enough_versions_are_published(world: World) -> None:
    trainer, node, batch, ahead = await two_batches(world, max_staleness=3)
    await node.make_ready(2)
    await trainer.ack(batch, BATCH_STAGE_TRAINED)
    assert (await trainer.acquire(2, base_version=1)).batch == ahead.batch
    third = await trainer.read_ahead(3, base_version=2)
    assert third.HasField("batch")
    await trainer.ack(ahead.batch, BATCH_STAGE_TRAINED)
    assert (await trainer.acquire(3, base_version=2, wait_s=0)).waiting_for == "publish"
    await trainer.publish(version=1, step=1)
    assert (await trainer.acquire(3, base_version=2)).batch == third.batch


async def test_one_batch_at_a_time_is_read_ahead_and_only_beside_one_in_hand(world: World) -> None:
    trainer, node = await world.started(dataset="Counting", max_staleness=3)
    await node.make_ready(8)
    assert (await trainer.read_ahead(2)).waiting_for == "not_ahead"
    assert (await trainer.read_ahead(1, base_version=0)).waiting_for == "not_ahead"
    batch = (await trainer.acquire(1)).batch
    assert (await trainer.read_ahead(3, base_version=2)).waiting_for == "not_ahead"
    ahead = (await trainer.read_ahead(2)).batch
    assert (await trainer.read_ahead(3, base_version=2)).waiting_for == "not_ahead"
    await trainer.ack(batch, BATCH_STAGE_TRAINED)
    # The one that was read ahead is not in hand before it is acquired for itself.
    assert (await trainer.read_ahead(3, base_version=2)).waiting_for == "not_ahead"
    assert (await trainer.acquire(2, base_version=1)).batch == ahead
    assert (await trainer.read_ahead(3, base_version=2)).HasField("batch")


@pytest.mark.parametrize(
    "recipe",
    [
        {"barrier": "batch", "max_staleness": 3},
        {"barrier": "phase"},
    ],
    ids=["batch", "phase"],
)
async def test_synchronous_runs_read_nothing_ahead(world: World, recipe: dict[str, object]) -> None:
    trainer, node = await world.started("a", "b", "c", "d", "e", "f", **recipe)
    await node.complete_all(await node.lease(2))
    assert (await trainer.acquire(1)).HasField("batch")
    assert (await trainer.read_ahead(2)).waiting_for == "not_ahead"


async def test_policies_that_take_turns_read_nothing_ahead(world: World) -> None:
    _, node = await world.started(
        *("a", "b", "c", "d", "e", "f"), policies=["solver", "critic"], alternate_every_steps=2
    )
    critic = await world.trainer("critic")  # whose turn is the first, by name
    await node.complete_all(await node.lease(2), policies=["critic"])
    assert (await critic.acquire(1)).HasField("batch")
    assert (await critic.read_ahead(2)).waiting_for == "not_ahead"


@pytest.mark.parametrize("how", ["skipped", "nacked", "quarantined", "returned", "discarded"])
async def test_it_goes_back_when_the_step_before_ends_otherwise(world: World, how: str) -> None:
    trainer, _, batch, ahead = await two_batches(world)
    if how == "skipped":
        await trainer.ack(batch, BATCH_STAGE_SKIPPED)
    elif how == "nacked":
        await trainer.nack(1)
    elif how == "quarantined":
        await trainer.quarantine(1)
    else:
        await world.void(batch, VOID_ACTION_RETURN if how == "returned" else VOID_ACTION_DISCARD)
    lost = how in ("skipped", "quarantined", "discarded")
    await world.has_account(in_batch=0, ready=4 if lost else 8)
    with pytest.raises(errors.NotFoundError, match="no batch is bound to step 2"):
        await trainer.fetch(2)
    with pytest.raises(errors.NotFoundError, match="no batch is bound to step 2"):
        await trainer.ack(ahead.batch, BATCH_STAGE_INTENT)
    # Whichever step is next has the groups that are due first, for the version that it starts from.
    step = 2 if how == "skipped" else 1
    again = (await trainer.acquire(step, base_version=0)).batch
    assert (tasks(again), again.base_version) == (tasks(ahead.batch if lost else batch), 0)


async def test_one_that_is_given_back_itself_leaves_the_step_before_alone(world: World) -> None:
    trainer, _, batch, ahead = await two_batches(world)
    assert await trainer.nack(2) == 2
    again = (await trainer.read_ahead(2)).batch
    assert (tasks(again), again.batch_id != ahead.batch.batch_id) == (tasks(ahead.batch), True)
    await world.void(again, VOID_ACTION_DISCARD)
    await trainer.ack(batch, BATCH_STAGE_TRAINED)
    await world.has_account(trained=4, in_batch=0, dropped={"voided": 4})


async def test_it_is_judged_for_the_version_that_its_step_will_have(world: World) -> None:
    trainer, node = await world.started(dataset="Counting", max_staleness=1)
    slow = await node.lease(2)
    await node.work(2)
    await trainer.train(1, base_version=0)
    await node.complete_all(slow)  # of version 0: for step 2 at most
    await node.work(2, version=1)
    batch = (await trainer.acquire(2, base_version=1)).batch
    assert {item.min_version for item in batch.items} == {0}
    # Step 3 starts from version 2, whatever the trainer says.
    ahead = (await trainer.read_ahead(3, base_version=0)).batch
    assert (ahead.base_version, {item.min_version for item in ahead.items}) == (2, {1})
    await world.has_account(dropped={})


async def test_what_would_be_too_old_for_it_stays_ready_for_the_step_before(world: World) -> None:
    trainer, node = await world.started(dataset="Counting", max_staleness=0)
    await node.make_ready(2)
    batch = (await trainer.acquire(1)).batch
    assert (await trainer.read_ahead(2)).waiting_for == "ready_groups"
    await trainer.nack(1)
    await world.has_account(ready=4, dropped={})
    assert tasks((await trainer.acquire(1)).batch) == tasks(batch)


async def test_a_group_for_which_its_step_is_the_last_takes_the_place_of_a_younger_one(world: World) -> None:
    trainer, node = await world.started(dataset="Counting", max_staleness=2)
    (slow, another) = await node.lease(2)
    await node.work(2)
    await trainer.train(1, base_version=0)
    await node.make_ready(4, version=1)
    batch = (await trainer.acquire(2, base_version=1)).batch
    ahead = (await trainer.read_ahead(3, base_version=2)).batch
    assert {item.min_version for item in ahead.items} == {1}
    await node.complete(slow)
    await trainer.ack(batch, BATCH_STAGE_TRAINED)
    await trainer.publish(version=2, step=2)
    again = (await trainer.acquire(3, base_version=2)).batch
    assert slow.task.task_id in tasks(again)
    assert len(tasks(again) & tasks(ahead)) == 1
    # One that comes later still has no place here, and is too old for any step after.
    await node.complete(another)
    assert (await trainer.acquire(3, base_version=2)).batch == again
    await world.has_account(in_batch=4, ready=4, dropped={})


async def test_it_is_bound_anew_where_its_step_starts_from_another_version(world: World) -> None:
    trainer, _, batch, ahead = await two_batches(world)
    await trainer.ack(batch, BATCH_STAGE_TRAINED)
    await trainer.publish(version=1, step=1)
    await trainer.publish(version=2, step=1, content=b"0", rollback_of=0)
    assert ahead.batch.base_version == 1
    # Its groups of version 0 are too old for a step that starts from version 2.
    assert (await trainer.acquire(2, base_version=2, wait_s=0)).waiting_for == "ready_groups"
    await world.has_account(trained=4, in_batch=0, ready=0, dropped={"stale": 4})


async def test_the_next_trainer_has_both_batches(world: World) -> None:
    trainer, _, batch, ahead = await two_batches(world)
    await trainer.ack(batch, BATCH_STAGE_INTENT)
    next_one = await world.trainer()
    assert (await next_one.acquire(1)).batch == batch
    assert (await next_one.read_ahead(2)).batch == ahead.batch
    with pytest.raises(errors.FencedError):
        await trainer.read_ahead(2)
    await next_one.ack(batch, BATCH_STAGE_TRAINED)
    # One that reads nothing ahead goes on like any.
    plain = await world.trainer()
    assert (await plain.acquire(2, base_version=1)).batch == ahead.batch
    await plain.ack(ahead.batch, BATCH_STAGE_TRAINED)
    await world.has_account(trained=8, in_batch=0, ready=0)


async def test_plug_ins_that_are_switched_choose_it_anew(world: World) -> None:
    trainer, _, batch, ahead = await two_batches(world, max_staleness=3)
    run = (await world.ask(runs.GetRunResponse)).run
    text = parse_recipe(
        run.recipe_yaml, overrides=["dataflow.selector=support.data_plugins:LastFirst"]
    ).yaml_text
    await world.ask(runs.UpdateRunResponse, recipe_yaml=text)
    await world.has_account(in_batch=8, ready=0)
    await trainer.ack(batch, BATCH_STAGE_TRAINED)
    await world.has_account(trained=4, in_batch=0, ready=4)
    again = (await trainer.acquire(2, base_version=1)).batch
    assert (tasks(again), again.batch_id != ahead.batch.batch_id) == (tasks(ahead.batch), True)


async def test_a_run_that_finishes_takes_it_back(world: World) -> None:
    trainer, _, batch, _ = await two_batches(world)
    await world.finish()
    await trainer.ack(batch, BATCH_STAGE_TRAINED)
    assert (await trainer.acquire(2, base_version=1, wait_s=0)).waiting_for == "run_finished"
    await world.has_account(trained=4, in_batch=0)


async def test_a_batch_that_is_read_ahead_is_waited_for_as_any(world: World) -> None:
    trainer, node, batch = await world.bound(max_staleness=3)
    named = {"step": 2, "base_version": 1, "read_ahead": True}
    waiting = asyncio.create_task(
        trainer._ask(AcquireBatchResponse, **named, wait_duration={"seconds": 20}, timeout_s=30)
    )
    await node.make_ready(2)
    assert (await waiting).batch.step == 2
    # The trainer works meanwhile: nobody is told that it waits for groups.
    assert "ready_groups" not in await world.waits()
    assert batch.step == 1
