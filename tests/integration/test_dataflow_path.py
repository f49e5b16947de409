"""The whole data path through a real server and a real Valkey."""

from __future__ import annotations

from astraflow.dataflow.v1 import batch_service_pb2
from support.dataflow_world import World

TRAINED = batch_service_pb2.BATCH_STAGE_TRAINED


async def test_a_task_becomes_a_batch_and_a_version(world: World) -> None:
    await world.create_run(dataset="Counting")
    trainer = await world.trainer()
    node = await world.node()
    for lease in await node.lease(2):
        assert await node.complete(lease) == ["ACCEPTED", "ACCEPTED"]
    batch = await trainer.train(1, base_version=0)
    assert len(batch.items) == 4
    bodies = await trainer.fetch(1)
    assert [item.trajectory_id for item in bodies] == [item.trajectory_id for item in batch.items]
    status = await world.status()
    account = status.trajectories
    assert (account.ingested, account.trained, account.conservation_error) == (4, 4, 0)
    assert status.policies[0].version.version == 1
