"""Versions: announced once, in order, by the current epoch; heard by everyone who listens."""

import asyncio
from functools import partial

import pytest

from astraflow import errors
from astraflow.dataflow.v1 import version_service_pb2
from astraflow.dataflow.v1.batch_service_pb2 import BATCH_STAGE_TRAINED as TRAINED
from support.dataflow_world import Trainer, World


async def train_one(world: World) -> Trainer:
    """A trainer whose step 1 is trained and not published."""
    trainer, _, batch = await world.bound()
    await trainer.ack(batch, TRAINED)
    return trainer


async def test_the_same_version_again_is_success_and_keeps_its_time(world: World) -> None:
    await world.create_run()
    trainer = await world.trainer(publish_first=False)
    first = await trainer.publish(version=0, step=0)
    again = await trainer.publish(version=0, step=0)
    assert first.publish_time.ToMilliseconds() > 0
    assert again == first


async def test_a_gap_in_the_numbers_is_refused_naming_the_newest_known_version(world: World) -> None:
    trainer = await train_one(world)
    with pytest.raises(errors.VersionGapError, match="next number is 1") as refused:
        await trainer.publish(version=2, step=1)
    assert refused.value.metadata["newest_version"] == "0"


async def test_numbers_that_nobody_can_read_leave_no_gap_and_are_never_announced(world: World) -> None:
    trainer = await train_one(world)
    with pytest.raises(errors.VersionGapError, match="next number is 1"):
        await trainer.publish(version=3, step=1, num_unreadable_before=1)
    await trainer.publish(version=3, step=1, num_unreadable_before=2)
    request = version_service_pb2.ListVersionsRequest(run_id="run", policy_id=trainer.policy_id)
    listed = await world.client.call(world.client.versions.ListVersions, request)
    assert [version.version for version in listed.versions] == [3, 0]


async def test_the_first_version_that_can_be_read_may_belong_to_step_zero(world: World) -> None:
    await world.create_run()
    trainer = await world.trainer(publish_first=False)
    assert (await trainer.publish(version=1, step=0, num_unreadable_before=1)).version == 1


async def test_one_epoch_publishes_one_version_per_step_and_a_newer_one_may_repeat_it(world: World) -> None:
    trainer = await train_one(world)
    await trainer.publish(version=1, step=1)
    with pytest.raises(errors.ConflictError, match="already published version 1"):
        await trainer.publish(version=2, step=1)
    successor = await world.trainer()
    assert (await successor.publish(version=2, step=1)).version == 2


@pytest.mark.parametrize(("version", "step"), [(0, 1), (1, 0)])
async def test_only_version_zero_belongs_to_step_zero(world: World, version: int, step: int) -> None:
    await world.create_run()
    trainer = await world.trainer(publish_first=False)
    with pytest.raises(errors.InvalidArgumentError, match="step"):
        await trainer.publish(version=version, step=step)


async def test_a_watcher_hears_the_newest_version_and_every_later_one(world: World) -> None:
    trainer = await train_one(world)
    request = version_service_pb2.WatchRequest(run_id="run")
    watched = world.client.stream(world.client.versions.Watch, request)
    async with asyncio.timeout(20):
        assert (await anext(watched)).version.version == 0
        await trainer.publish(version=1, step=1)
        assert (await anext(watched)).version.version == 1


async def test_versions_are_listed_newest_first_in_pages(world: World) -> None:
    trainer = await train_one(world)
    await trainer.publish(version=1, step=1)
    page = partial(world.ask, version_service_pb2.ListVersionsResponse, policy_id="solver", page_size=1)
    first = await page()
    second = await page(page_token=first.next_page_token)
    assert [item.version for item in [*first.versions, *second.versions]] == [1, 0]
    assert second.next_page_token == ""


async def test_a_push_waits_a_moment_for_an_announcement_on_its_way(world: World) -> None:
    trainer = await train_one(world)
    node = await world.node()
    (lease,) = await node.lease()
    pushing = asyncio.create_task(node.push(node.episode(lease, 0, version=1)))
    await asyncio.sleep(0.1)
    await trainer.publish(version=1, step=1)
    assert (await pushing).reason == ""


async def test_a_version_of_an_older_epoch_that_redis_forgot_is_announced_again(world: World) -> None:
    """Its step was forgotten too and is taken again; the credit of what is bound now stays taken."""
    trainer, node = await world.started(dataset="Counting")
    await node.work(2)
    await trainer.claim()
    batch = (await trainer.acquire(1)).batch
    announced = await trainer.publish(version=1, step=1, writer_epoch=trainer.epoch - 1)
    assert (announced.version, announced.trainer_epoch) == (1, trainer.epoch - 1)
    assert (await world.status()).policies[0].unpublished_groups == 2
    await trainer.ack(batch, TRAINED)
    await trainer.publish(version=2, step=1)
    policy = (await world.status()).policies[0]
    assert (policy.version.version, policy.unpublished_groups) == (2, 0)


async def test_a_rollback_takes_no_step_and_gives_back_the_credit_of_steps_it_gives_up(world: World) -> None:
    trainer = await train_one(world)
    await trainer.publish(version=1, step=1)
    node = await world.node()
    await node.work(2)
    await trainer.ack((await trainer.acquire(2, base_version=1)).batch, TRAINED)
    (before,) = (await world.status()).policies
    back = await world.trainer()
    told = await back.publish(version=2, step=1, rollback_of=0)
    (after,) = (await world.status()).policies
    assert (before.unpublished_groups, after.unpublished_groups) == (2, 0)
    assert (told.HasField("rollback_of"), told.rollback_of, told.step) == (True, 0, 1)
    assert (await back.publish(version=3, step=2)).version == 3


async def test_a_rollback_goes_back_and_the_step_before_it_keeps_its_version(world: World) -> None:
    trainer = await train_one(world)
    with pytest.raises(errors.InvalidArgumentError, match="not older"):
        await trainer.publish(version=1, step=1, rollback_of=1)
    await trainer.publish(version=1, step=1)
    await (await world.trainer()).publish(version=2, step=1, rollback_of=0)
    assert await world.dataflow.versions.store.versions.of_steps("run", "solver", [1]) == {1: 1}
