"""What trainers measure reaches the filter that learns from it, and survives a killed server."""

from collections.abc import Sequence

import pytest

from astraflow.dataflow.v1 import batch_service_pb2 as batches
from astraflow.errors import InvalidArgumentError
from support.dataflow_process import DataflowProcess
from support.dataflow_world import Trainer, World

pytestmark = [pytest.mark.integration, pytest.mark.slow]

FILTER = "astraflow_dataflow.plugins.filters.agreement:Agreement"
FILTERS = f'[{{use: "{FILTER}", with: {{least: 2}}}}]'


async def trained(trainer: Trainer, step: int, mismatch_kl: Sequence[float]) -> set[str]:
    """Train a step of which this was measured; the nodes that its items name."""
    batch = (await trainer.acquire(step)).batch
    await trainer.ack(batch, batches.BATCH_STAGE_TRAINED, mismatch_kl=mismatch_kl)
    return {item.node_id for item in batch.items}


async def test_groups_of_a_node_that_disagreed_are_dropped_also_after_a_kill(
    process: DataflowProcess,
) -> None:
    process.start()
    async with process.world(retry_s=20) as world:
        trainer, node = await world.started(dataset="Unevaluated", filters=FILTERS, max_staleness=8)
        other = await world.node("n2")
        await node.work(2)
        assert await trained(trainer, 1, [0.5, 0.3, 0.5, 0.3]) == {"n1"}
        process.kill()
        process.start()
        await node.work(1)
        await other.work(2)
        await world.until(lambda status: not status.trajectories.assembling)
        await world.has_account(ready=4, dropped={"filtered": 2})
        assert await trained(trainer, 2, ()) == {"n2"}


async def test_a_shadow_learns_and_drops_nothing(world: World) -> None:
    shadow = f'[{{use: "{FILTER}", with: {{least: 2}}, shadow: true}}]'
    trainer, node = await world.started(dataset="Unevaluated", filters=shadow, max_staleness=8)
    await node.work(2)
    await trained(trainer, 1, [0.5, -1, 0.5, -1])
    await node.work(1)
    await world.until(lambda status: status.trajectories.ready == 2)
    (counted,) = (await world.status()).shadows
    assert (counted.asked, counted.refused) == (3, 1)


async def test_another_number_of_values_than_items_is_refused_and_changes_nothing(world: World) -> None:
    trainer, node = await world.started(dataset="Unevaluated", filters=FILTERS)
    await node.work(2)
    batch = (await trainer.acquire(1)).batch
    with pytest.raises(InvalidArgumentError, match=r"has 1 values, batch .* has 4 items; give one for each"):
        await trainer.ack(batch, batches.BATCH_STAGE_TRAINED, mismatch_kl=[0.5])
    await world.has_account(in_batch=4)


async def test_a_filter_that_raises_while_it_learns_is_named_and_the_step_is_trained(world: World) -> None:
    filters = '["support.broken_plugins:Measuring"]'
    trainer, node = await world.started(dataset="Unevaluated", filters=filters)
    await node.work(2)
    await trained(trainer, 1, [0.5] * 4)
    assert "no such step" in (await world.waits())["filter_failed"].detail
    await world.has_account(trained=4)
