"""A trainer whose recipe names a broken plug-in ends with its name, and what it had not trained on stays bound."""

import asyncio
from pathlib import Path

import pytest

from astraflow_kit.lifecycle import ExitCode
from support import trainer_process as trainers
from support.dataflow_world import World
from support.trainer_process import forking, valkey

__all__ = ["forking", "valkey"]

pytestmark = [pytest.mark.slow]


async def _end(world: World, folder: Path, loss: str, *, groups: int) -> trainers.TrainerProcess:
    """A trainer of a run with this loss, which ended as one does whose settings are wrong."""
    await trainers.create_run(world, folder=folder, overrides=[f"trainer.algorithm.loss={loss}"])
    trainer = trainers.TrainerProcess(world.address, folder)
    pushing = asyncio.create_task(trainers.push_groups(world, count=groups))
    try:
        trainer.start()
        await trainer.exits_with(ExitCode.USAGE)
    finally:
        pushing.cancel()
        trainer.kill()
    return trainer


async def test_a_loss_with_wrong_settings_ends_the_trainer_before_it_claims(
    world: World, tmp_path: Path
) -> None:
    loss = '{use: "support.broken_plugins:Loss", with: {cap: 1}}'
    trainer = await _end(world, tmp_path, loss, groups=0)
    assert "has no setting 'cap'" in trainer.log
    assert (await world.status()).policies[0].trainer_epoch == 0
