"""A run whose episodes act in a served environment that is killed in the middle: nothing lost, nothing doubled."""

from pathlib import Path

import pytest

from astraflow.rollout.v1 import trajectory_pb2
from support.dataflow_world import World
from support.environments import served_environment
from support.raas_node import local_node

pytestmark = pytest.mark.integration

MULTI_TURN = """{use: "astraflow_raas.workflows.multi_turn:MultiTurn",
  with: {environment: "served:Echo", max_tokens: 512}}"""


async def test_training_goes_on_after_the_environment_was_killed(world: World, tmp_path: Path) -> None:
    raas = {"workflow": MULTI_TURN, "max_concurrent_tasks": 2}
    await world.create_run(dataset="Counting", raas=raas, max_attempts=50)
    trainer = await world.trainer()
    echo = ("--workers", "2", "--sessions-per-worker", "8")
    async with served_environment(tmp_path, *echo, use="support.environments:Echo") as service:
        port = service.address.rpartition(":")[2]
        node = local_node(world.address, tmp_path, environments=(f"Echo={service.address}",))
        async with node:
            await trainer.train(1, base_version=0)
            await service.until(lambda now: now["sessions"]["open"] > 0)
            await service.kill()
            async with served_environment(tmp_path, *echo, "--port", port, use="support.environments:Echo"):
                for step in range(2, 5):
                    batch = await trainer.train(step, base_version=step - 1)
                    ids = [item.trajectory_id for item in batch.items]
                    assert len(set(ids)) == len(ids)
                (body, *_) = await trainer.fetch(4)
    message = trajectory_pb2.Trajectory.FromString(body.body)
    assert [span.reward for span in message.turn_spans if span.role == "assistant"] == [1.0] * 3
    await world.has_account(trained=16)
