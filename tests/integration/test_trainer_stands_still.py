"""A trainer whose training thread hangs ends and goes on; one whose server's Redis hangs waits. All are processes."""

import asyncio
from pathlib import Path

import pytest

from astraflow_kit.lifecycle import ExitCode
from support import trainer_process as trainers
from support.dataflow_process import DataflowProcess
from support.dataflow_world import World, until
from support.ledger_audit import audit
from support.trainer_process import TrainerProcess, census_of, forking, valkey
from support.valkey import ValkeyServer

__all__ = ["forking", "valkey"]

STEPS = 4
STALL_S = 8.0
HANGS = "trainer.micro_batch=sleep:100000@3"
pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]


async def test_a_training_thread_that_hangs_is_named_and_the_next_trainer_takes_the_step(
    world: World, tmp_path: Path
) -> None:
    run = await trainers.create_run(world, folder=tmp_path, steps=STEPS)
    trainer = TrainerProcess(world.address, tmp_path)
    async with trainers.recorded(world, trainer, steps=STEPS):
        trainer.start(failpoints=HANGS, training_stall_s=STALL_S)
        said: list[str] = []

        async def is_named() -> bool:
            wait = (await world.waits()).get("trainer_hung")
            said.extend([wait.detail] if wait else [])
            return wait is not None

        await until(is_named, within_s=120)
        assert "the bound is 8; it is in _act (failpoints.py:" in said[0]
        await trainer.exits_with(ExitCode.UNAVAILABLE)
        assert "training.hung" in trainer.log
        await trainer.lives(failpoints=HANGS)
        assert "trainer_hung" not in await world.waits()
    assert census_of(run).steps == list(range(STEPS + 1))
    assert audit(trainer.ledger).last_step == STEPS
    await trainers.require_trained(world, steps=STEPS)


async def test_a_redis_that_stands_still_costs_a_trainer_time_and_nothing_else(
    own_valkey: ValkeyServer, tmp_path: Path
) -> None:
    server = DataflowProcess(own_valkey.url, tmp_path)
    server.start()
    trainer = TrainerProcess(server.address, tmp_path)
    try:
        async with server.world(retry_s=60) as world:
            await trainers.create_run(world, folder=tmp_path, steps=STEPS)
            pushing = asyncio.create_task(trainers.push_groups(world, count=STEPS * trainers.GROUPS_PER_STEP))
            trainer.start(failpoints="trainer.step_taken=stop@2")
            await trainer.frozen()
            await pushing

            async def says_so() -> bool:
                return "server.silent" in trainer.log and "gave no answer" in trainer.log

            with own_valkey.stopped():
                trainer.go_on()
                await until(says_so, within_s=60)
                assert trainer.is_alive()
            await trainer.exits_with(0)
            assert audit(trainer.ledger).num_replayed == 0
            await trainers.require_trained(world, steps=STEPS)
    finally:
        trainer.kill()
        server.kill()
