"""A trainer whose store is unmounted, or read-only, waits for it by name, writes nothing elsewhere and goes on."""

from pathlib import Path

import grpc.aio
import pytest

from astraflow.trainer.v1 import trainer_service_pb2 as trainer_pb2
from astraflow.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub
from support import trainer_process as trainers
from support.dataflow_world import World, until
from support.ledger_audit import audit
from support.mount_points import unmounted
from support.trainer_process import KILLED, TrainerProcess, census_of, forking, valkey

__all__ = ["forking", "valkey"]

STEPS = 4
pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(240)]


async def waits_for(trainer: TrainerProcess, reason: str) -> None:
    """Return once the trainer says that it waits for this."""

    async def does() -> bool:
        if trainer.grpc_address is None:
            return False
        async with grpc.aio.insecure_channel(trainer.grpc_address) as channel:
            status = await TrainerServiceStub(channel).Status(trainer_pb2.StatusRequest())
        return status.waiting_for == reason

    await until(does, within_s=120)


async def test_a_store_that_is_unmounted_while_a_version_is_published_is_waited_for(
    world: World, tmp_path: Path
) -> None:
    run = await trainers.create_run(world, folder=tmp_path, steps=STEPS)
    trainer, store = TrainerProcess(world.address, tmp_path), tmp_path / "run.store"
    async with trainers.recorded(world, trainer, steps=STEPS):
        trainer.start(failpoints="trainer.before_publish=stop@2")
        await trainer.frozen()
        back = unmounted(store)
        trainer.go_on()
        await waits_for(trainer, "store_missing")
        back()
        await trainer.exits_with(0)
    assert census_of(run).steps == list(range(STEPS + 1))
    assert audit(trainer.ledger).last_step == STEPS
    await trainers.require_trained(world, steps=STEPS)


async def test_a_trainer_that_starts_before_its_store_is_mounted_waits_for_it(
    world: World, tmp_path: Path
) -> None:
    run = await trainers.create_run(world, folder=tmp_path, steps=STEPS)
    trainer, store = TrainerProcess(world.address, tmp_path), tmp_path / "run.store"
    async with trainers.recorded(world, trainer, steps=STEPS):
        await trainer.lives(failpoints="trainer.committed=kill@3", status=KILLED)
        back = unmounted(store)
        trainer.start()

        async def says_so() -> bool:
            return "store.waits" in trainer.log

        await until(says_so, within_s=120)
        back()
        await trainer.exits_with(0)
    assert census_of(run).steps == list(range(STEPS + 1))
