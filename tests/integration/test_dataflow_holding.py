"""Who holds a policy: the trainer that claimed it, while it is heard of, and nobody who only passes by."""

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from astraflow.dataflow.v1 import batch_service_pb2 as batches
from astraflow.errors import (
    FencedError,
    InvalidArgumentError,
    NotFoundError,
    PolicyHeldError,
    PreconditionError,
)
from support.dataflow_world import Trainer, World, served, until


async def passing(world: World, *, trainer_id: str = "rollback") -> Trainer:
    """Who claims the policy only when nobody holds it."""
    trainer = Trainer(world=world, policy_id="solver")
    await trainer.claim(trainer_id=trainer_id, only_if_unheld=True)
    return trainer


async def test_a_policy_that_a_trainer_holds_is_not_claimed_in_passing(world: World) -> None:
    holder, _ = await world.started()
    with pytest.raises(PolicyHeldError, match=r"held by trainer test, which claimed it 0 s ago") as refused:
        await passing(world)
    assert refused.value.metadata["holder"] == "test"
    assert "stop that trainer" in refused.value.message
    await holder.hold()


async def test_a_policy_that_nobody_claimed_or_its_trainer_released_is_claimed_in_passing(
    world: World,
) -> None:
    await world.create_run()
    first = await passing(world)
    trainer = await world.trainer()
    await trainer.release()
    second = await passing(world)
    assert first.epoch < trainer.epoch < second.epoch
    with pytest.raises(FencedError):
        await trainer.hold()


async def test_who_claims_in_passing_holds_nothing(world: World) -> None:
    await world.create_run()
    first, second = await passing(world, trainer_id="one"), await passing(world, trainer_id="two")
    with pytest.raises(FencedError, match="of trainer two"):
        await first.publish(version=0, step=0)
    trainer = Trainer(world=world, policy_id="solver")
    await trainer.claim()
    with pytest.raises(FencedError):
        await second.publish(version=0, step=0)


async def test_a_lost_answer_hinders_not_the_same_claimer_and_an_unknown_policy_is_refused(
    world: World,
) -> None:
    trainer, _ = await world.started()
    await trainer.claim(trainer_id="test", only_if_unheld=True)
    with pytest.raises(NotFoundError):
        await Trainer(world=world, policy_id="nobody").claim(only_if_unheld=True)


async def test_an_older_trainer_releases_nothing(world: World) -> None:
    await world.create_run()
    older, _ = await world.trainer(), await world.trainer()
    with pytest.raises(FencedError):
        await older.release()
    with pytest.raises(PolicyHeldError):
        await passing(world)


@pytest.mark.parametrize("sign", ["hold", "acquire"])
async def test_a_trainer_that_is_heard_of_goes_on_holding(redis_url: str, tmp_path: Path, sign: str) -> None:
    async with served(redis_url, tmp_path, batch_lease_s=1) as world:
        trainer, _ = await world.started()
        for _ in range(6):
            await asyncio.sleep(0.25)
            await (trainer.hold() if sign == "hold" else trainer.acquire(1, wait_s=0))
        with pytest.raises(PolicyHeldError, match="claimed it 1 s ago"):
            await passing(world)


async def test_a_trainer_that_was_killed_holds_for_a_lease_time(redis_url: str, tmp_path: Path) -> None:
    async with served(redis_url, tmp_path, batch_lease_s=1) as world:
        await world.started()

        async def is_free() -> bool:
            with suppress(PolicyHeldError):
                await passing(world)
                return True
            return False

        assert not await is_free()
        await until(is_free)


LOSS = batches.AcceptedLoss(identity="a" * 32, step=6)


async def restored(world: World) -> None:
    """Redis was stopped, and another state of it put in its place."""
    await world.dataflow.connection.replace_incarnation(await world.dataflow.connection.data_incarnation())


async def in_doubt(trainer: Trainer) -> None:
    """The trainer claims the policy, and does not trust what it finds."""
    await trainer.claim()
    await trainer.release(doubt="Redis is older")


async def test_a_loss_that_was_accepted_goes_on_after_its_step_and_its_batch_is_voided(world: World) -> None:
    trainer, node, batch = await world.bound(groups=2)
    await restored(world)
    await in_doubt(trainer)
    claim = await trainer.claim(accepted_loss=LOSS)
    assert (claim.identity, claim.last_finished_step, claim.last_durable_step) == (LOSS.identity, 6, 6)
    await world.has_account(dropped={"voided": len(batch.items)}, in_batch=0)
    assert (await trainer.claim(accepted_loss=LOSS)).last_finished_step == 6
    await node.make_ready(2)
    assert (await trainer.train(7, base_version=0)).step == 7
    assert (await trainer.claim(accepted_loss=LOSS)).last_finished_step == 7


async def test_no_loss_is_accepted_of_a_redis_that_a_trainer_went_on_from(world: World) -> None:
    trainer, _, batch = await world.bound(groups=2)
    identity = (await trainer.claim()).identity
    await trainer.release(doubt="so it is said")
    with pytest.raises(PreconditionError, match="its last finished step stays 0: a trainer went on"):
        await trainer.claim(accepted_loss=LOSS)
    claim = await trainer.claim()
    assert (claim.identity, claim.last_finished_step, claim.trainer_epoch) == (identity, 0, 3)
    assert (await trainer.acquire(1)).batch.batch_id == batch.batch_id


async def test_no_loss_is_accepted_that_no_trainer_has_found(world: World) -> None:
    trainer, *_ = await world.bound(groups=2)
    await restored(world)
    await trainer.claim()
    for step in (0, 6):
        with pytest.raises(PreconditionError, match="no trainer doubts what this Redis has"):
            await trainer.claim(accepted_loss=batches.AcceptedLoss(identity="a" * 32, step=step))


async def test_who_has_not_claimed_is_heard_only_while_nobody_holds_the_policy(
    redis_url: str, tmp_path: Path
) -> None:
    async with served(redis_url, tmp_path, batch_lease_s=1) as world:
        await world.started()
        starting = Trainer(world, "solver")
        with pytest.raises(PolicyHeldError, match="solver is held by trainer test"):
            await starting.hold(waiting_for="store_missing", detail="delete it")

        async def is_heard() -> bool:
            with suppress(PolicyHeldError):
                await starting.hold(waiting_for="warm_start")
                return True
            return False

        await until(is_heard)
        assert "warm_start" in await world.waits()


async def test_a_loss_is_accepted_for_an_identity_only(world: World) -> None:
    trainer, _ = await world.started()
    with pytest.raises(InvalidArgumentError, match="identity is '', which must match"):
        await trainer.claim(accepted_loss=batches.AcceptedLoss(step=6))
