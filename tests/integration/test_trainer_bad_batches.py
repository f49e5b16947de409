"""What a trainer cannot train on costs its group, or its batch, and never the run.

A real trainer and a real server, and Redis holds something else than what was pushed.
"""

from pathlib import Path

import pytest

from astraflow.dataflow.v1 import batch_pb2
from astraflow_dataflow.store.keys import Keys
from astraflow_dataflow.store.replies import as_bytes, as_list, as_text
from support import trainer_process as trainers
from support.dataflow_world import World
from support.trainer_process import KILLED, POLICY, TrainerProcess, forking, valkey

__all__ = ["forking", "valkey"]

STEPS = 4
TRAJECTORIES_PER_STEP = trainers.GROUPS_PER_STEP * trainers.GROUP_SIZE
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


async def damage_the_batch(world: World, *, step: int) -> None:
    """The manifest of the batch that is bound to a step loses a trajectory."""
    connection, keys = world.dataflow.connection, Keys(world.run_id)
    batch_id = as_text(await connection.raw("HGET", keys.of("steps", POLICY), step))
    manifest = as_bytes(await connection.raw("HGET", keys.of("batch", batch_id), "manifest"))
    batch = batch_pb2.Batch.FromString(manifest)
    batch.items.pop()
    await connection.raw("HSET", keys.of("batch", batch_id), "manifest", batch.SerializeToString())


async def damage_a_payload(world: World) -> str:
    """A payload of the group that is bound next is overwritten; its trajectory."""
    connection, keys = world.dataflow.connection, Keys(world.run_id)
    (group,) = as_list(await connection.raw("ZRANGE", keys.of("ready", POLICY), 0, 0))
    ids = as_text(await connection.raw("HGET", keys.of("group", as_text(group)), "ids")).splitlines()
    (place,) = await world.dataflow.store.payloads.places(world.run_id, ids[:1])
    await connection.raw("SET", keys.of("payload", place.text, ids[0]), b"damaged")
    return ids[0]


async def test_a_damaged_batch_is_quarantined_a_damaged_payload_left_out_and_the_run_trained(
    world: World, tmp_path: Path
) -> None:
    run = await trainers.create_run(world, folder=tmp_path, steps=STEPS)
    trainer, log = TrainerProcess(world.address, tmp_path), tmp_path / "trainer.log"
    async with trainers.recorded(world, trainer, steps=STEPS + 1):
        await trainer.lives(failpoints="trainer.intent_recorded=kill@2", status=KILLED)
        await world.until(lambda now: now.trajectories.ingested == (STEPS + 1) * TRAJECTORIES_PER_STEP)
        await damage_the_batch(world, step=2)
        lost = await damage_a_payload(world)
        await trainer.lives(failpoints="trainer.step_acked=kill@2", status=KILLED)
        first = log.read_text()
        await trainer.lives()
        again = log.read_text().removeprefix(first)
    assert "batch.quarantined" in first
    assert "digest_mismatch" in first
    # Replayed, the step leaves out the same group, and the batch that was quarantined does not come back.
    for life in (first, again):
        assert "batch.group_left_out" in life
        assert f"the body of {lost} (7 bytes) is not a serialized Trajectory" in life
    assert "batch.quarantined" not in again
    assert trainers.census_of(run).steps == list(range(STEPS + 1))
    await world.has_account(
        ingested=(STEPS + 1) * TRAJECTORIES_PER_STEP,
        trained=STEPS * TRAJECTORIES_PER_STEP,
        dropped={"quarantined": TRAJECTORIES_PER_STEP},
    )
