"""Voided batches: taken away by an operator, told to the trainer, and every trajectory accounted for."""

import pytest

from astraflow.dataflow.v1 import batch_pb2
from astraflow.dataflow.v1 import batch_service_pb2 as pb
from astraflow.errors import InvalidArgumentError, NotFoundError, PreconditionError
from support.dataflow_world import Trainer, World

INTENT, TRAINED = pb.BATCH_STAGE_INTENT, pb.BATCH_STAGE_TRAINED
RETURN, DISCARD = pb.VOID_ACTION_RETURN, pb.VOID_ACTION_DISCARD


async def bound(world: World) -> tuple[Trainer, batch_pb2.Batch]:
    """A trainer that holds a batch of two groups."""
    trainer, _, batch = await world.bound()
    await trainer.ack(batch, INTENT)
    return trainer, batch


async def test_a_returned_batch_is_bound_again_under_another_id_and_trained(world: World) -> None:
    trainer, batch = await bound(world)
    assert await world.void(batch, RETURN) == (2, 0)
    with pytest.raises(PreconditionError, match=r"bad data.*acquire the step again") as refused:
        await trainer.ack(batch, TRAINED)
    assert refused.value.metadata["voided"] == batch.batch_id
    again = (await trainer.acquire(1)).batch
    assert again.items == batch.items
    assert again.batch_id != batch.batch_id
    with pytest.raises(PreconditionError, match="voided"):
        await trainer.ack(batch, TRAINED)
    assert await trainer.ack(again, TRAINED) == TRAINED
    await world.has_account(trained=4)


async def test_a_discarded_batch_ends_as_voided_and_the_next_one_is_other_data(world: World) -> None:
    trainer, batch = await bound(world)
    assert await world.void(batch, DISCARD) == (0, 4)
    await world.has_account(dropped={"voided": 4}, in_batch=0)
    await (await world.node()).work(2)
    again = (await trainer.acquire(1)).batch
    taken, voided = ({item.trajectory_id for item in bound.items} for bound in (again, batch))
    assert not taken & voided
    assert len(await trainer.fetch(1)) == 4


async def test_whoever_asks_for_the_step_of_a_voided_batch_is_told(world: World) -> None:
    trainer, batch = await bound(world)
    await world.void(batch, DISCARD)
    with pytest.raises(PreconditionError, match=r"was voided \(bad data\); acquire the step again"):
        await trainer.fetch(1)
    with pytest.raises(PreconditionError, match="was voided"):
        await trainer._ask(pb.RenewBatchResponse, step=1)


async def test_voiding_twice_is_voiding_once_and_never_the_next_batch(world: World) -> None:
    trainer, batch = await bound(world)
    assert await world.void(batch, RETURN) == (2, 0)
    again = (await trainer.acquire(1)).batch
    assert await world.void(batch, RETURN) == (2, 0)
    assert (await trainer.acquire(1)).batch.batch_id == again.batch_id
    await world.has_account()


async def test_a_trained_batch_cannot_be_voided(world: World) -> None:
    trainer, batch = await bound(world)
    await trainer.ack(batch, TRAINED)
    with pytest.raises(PreconditionError, match="step 1 is trained"):
        await world.void(batch, DISCARD)


async def test_only_a_bound_batch_is_voided_and_only_in_a_known_way(world: World) -> None:
    _, batch = await bound(world)
    with pytest.raises(InvalidArgumentError, match="VOID_ACTION"):
        await world.void(batch, 0)
    with pytest.raises(InvalidArgumentError, match="at most 256"):
        await world.void(batch, RETURN, "x" * 257)
    batch.batch_id = "solver-1-99"
    with pytest.raises(NotFoundError, match="is not bound to step 1"):
        await world.void(batch, RETURN)
