"""Replay: trained groups that steps train on again, what they cost in Redis, and what a kill leaves of them."""

import random

import pytest

from astraflow.dataflow.v1 import batch_pb2
from astraflow.dataflow.v1 import batch_service_pb2 as batches
from astraflow.errors import InvalidArgumentError
from astraflow_dataflow.store.connection import Connection
from astraflow_dataflow.store.keys import Keys
from support.dataflow_process import DataflowProcess
from support.dataflow_world import Node, Trainer, World, recipe_text

pytestmark = pytest.mark.integration


def replaying(**settings: object) -> dict[str, object]:
    """A recipe whose steps have a new group, and one that they replay."""
    written = ", ".join(
        f"{name}: {value}" for name, value in ({"ratio": 0.5, "order": "recent"} | settings).items()
    )
    return {"dataset": "Counting", "max_staleness": 8, "replay": f"{{{written}}}"}


def uses(batch: batch_pb2.Batch) -> dict[str, int]:
    """The use number of each group of a batch."""
    return {item.group_id.partition("/")[0]: item.use for item in batch.items}


async def step(trainer: Trainer, node: Node, number: int, **changes: object) -> dict[str, int]:
    """Make a group ready and train a step, from the newest version; what it trained on."""
    await node.make_ready(1, **({"version": number - 1} | changes))
    return uses(await trainer.train(number, base_version=number - 1))


async def payloads(redis_url: str) -> int:
    """Trajectories stored in Redis."""
    async with Connection(redis_url, allow_volatile=True) as connection:
        return len(await connection.raw("KEYS", Keys("run").of("payload", "*", "*")))  # type: ignore[arg-type]


async def test_a_step_replays_what_was_trained_and_the_account_counts_it_once(world: World) -> None:
    trainer, node = await world.started(**replaying())
    assert await step(trainer, node, 1) == {"train-0": 0}
    assert await step(trainer, node, 2) == {"train-1": 0, "train-0": 1}
    # It was used as often as it may be.
    assert await step(trainer, node, 3) == {"train-2": 0, "train-1": 1}
    await world.has_account(ingested=6, trained=6, in_batch=0, ready=0)
    batch = (await trainer.acquire(3, base_version=2)).batch
    assert {item.trajectory_id for item in batch.items} == {
        reply.trajectory_id for reply in await trainer.fetch(3)
    }


async def test_a_group_is_replayed_as_often_as_it_may_be(world: World) -> None:
    trainer, node = await world.started(**replaying(max_uses=2, max_groups=1))
    found = [await step(trainer, node, number) for number in range(1, 4)]
    assert found == [{"train-0": 0}, {"train-1": 0, "train-0": 1}, {"train-2": 0, "train-1": 1}]


async def test_groups_too_stale_are_not_replayed_and_go(world: World, redis_url: str) -> None:
    trainer, node = await world.started(**replaying(max_staleness=1, max_uses=9))
    for number in range(1, 4):
        await step(trainer, node, number)
    # Step 4 starts from version 3: of the groups of versions 0, 1 and 2 the last one may be replayed.
    assert await step(trainer, node, 4) == {"train-3": 0, "train-2": 1}
    await trainer.mark_durable(4)
    assert await payloads(redis_url) == 4


async def test_what_is_kept_is_bounded_and_ends_with_the_run(world: World, redis_url: str) -> None:
    trainer, node = await world.started(**replaying(max_groups=2, max_uses=99))
    for number in range(1, 7):
        await step(trainer, node, number)
        await trainer.mark_durable(number)
        # The step's own group and one older are kept.
        assert await payloads(redis_url) == 2 * min(number, 2)
    await world.finish()
    await trainer.mark_durable(6)
    assert await payloads(redis_url) == 0
    await world.has_account(trained=12)


@pytest.mark.parametrize("order", ["recent", "uniform"])
async def test_the_newest_are_replayed_or_any_as_the_order_says(world: World, order: str) -> None:
    trainer, node = await world.started(**replaying(order=order, max_uses=99, max_staleness=99))
    found = [await step(trainer, node, number) for number in range(1, 13)]
    replayed = [[name for name, use in uses.items() if use] for uses in found[1:]]
    # Drawn of 1, 2, … 11 alike, always the newest comes once in 11! = 39,916,800.
    assert (replayed == [[f"train-{number}"] for number in range(11)]) is (order == "recent")


async def test_the_largest_advantages_come_first_by_priority(world: World) -> None:
    trainer, node = await world.started(**replaying(order="priority", max_uses=9))
    await step(trainer, node, 1)
    await step(trainer, node, 2, reward=1.0)
    # The second group had equal rewards, which teach nothing.
    assert await step(trainer, node, 3) == {"train-2": 0, "train-0": 2}


@pytest.mark.parametrize("action", [batches.VOID_ACTION_RETURN, batches.VOID_ACTION_DISCARD])
async def test_a_batch_that_is_taken_back_gives_back_what_it_replays(world: World, action: int) -> None:
    trainer, node = await world.started(**replaying())
    await step(trainer, node, 1)
    await node.make_ready(2, version=1)
    for _ in range(2):
        batch = (await trainer.acquire(2, base_version=1)).batch
        assert uses(batch) == {"train-1": 0, "train-0": 1}
        assert await trainer.nack(2) == 1
    batch = (await trainer.acquire(2, base_version=1)).batch
    await world.void(batch, action)
    again = uses((await trainer.acquire(2, base_version=1)).batch)
    assert again.pop("train-0") == 1
    assert list(again.values()) == [0]
    await world.has_account(in_batch=2)


async def test_a_killed_server_and_a_new_trainer_get_the_same_batch(process: DataflowProcess) -> None:
    process.start()
    async with process.world(retry_s=20) as world:
        trainer, node = await world.started(**replaying(order="uniform"))
        for number in range(1, 4):
            await step(trainer, node, number)
        await trainer.mark_durable(1)
        before = [(await trainer.acquire(number, base_version=number - 1)).batch for number in (2, 3)]
        process.kill()
        process.start()
        await trainer.claim()
        after = [(await trainer.acquire(number, base_version=number - 1)).batch for number in (2, 3)]
        assert after == before
        assert len(await trainer.fetch(2)) == len(before[0].items) == 4
        assert 1 in (await step(trainer, node, 4)).values()


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_happens_every_payload_is_freed_in_the_end(
    world: World, redis_url: str, seed: int
) -> None:
    draw = random.Random(seed)
    order = ("recent", "uniform", "priority")[seed]
    trainer, node = await world.started(**replaying(order=order, max_groups=3, max_uses=2, max_staleness=4))
    finished = 0
    for _ in range(40):
        if not (await world.status()).trajectories.ready:
            await node.make_ready(1, version=finished)
        batch = (await trainer.acquire(finished + 1, base_version=finished)).batch
        match draw.randrange(5):
            case 0:
                await trainer.nack(batch.step)
                continue
            case 1:
                await world.void(
                    batch, draw.choice([batches.VOID_ACTION_RETURN, batches.VOID_ACTION_DISCARD])
                )
                continue
            case 2:
                await trainer.mark_durable(draw.randint(0, finished))
        assert len(await trainer.fetch(batch.step)) == len(batch.items)
        await trainer.train(batch.step, base_version=finished)
        finished += 1
    await world.has_account(in_batch=0)
    await trainer.mark_durable(finished)
    ready = (await world.status()).trajectories.ready
    assert await payloads(redis_url) <= ready + 2 * 3
    await world.finish()
    await trainer.mark_durable(finished)
    assert await payloads(redis_url) == ready


def test_a_ratio_of_no_group_is_refused() -> None:
    with pytest.raises(Exception, match="less than one group") as refused:
        recipe_text(replay="{ratio: 0.3}")
    assert not isinstance(refused.value, InvalidArgumentError)


async def test_a_selector_is_asked_for_the_groups_of_its_policy(world: World) -> None:
    trainer, node = await world.started(
        dataset="Counting",
        selector='"astraflow_dataflow.plugins.selectors.fifo:Fifo"',
        max_staleness=8,
        overrides=["policies.solver.dataflow.groups_per_step=3"],
    )
    await node.make_ready(3)
    assert len((await trainer.acquire(1)).batch.items) == 6
