"""The trainer of a policy that is not trained publishes version 0 and ends; starting it again changes nothing."""

from pathlib import Path

import pytest

from astraflow_weights.store import open_store
from support.dataflow_world import Trainer, World
from support.published_models import read_log
from support.trainer_process import TrainerProcess, create_run, forking, tiny_model, valkey

__all__ = ["forking", "valkey"]

pytestmark = [pytest.mark.slow]


async def test_a_frozen_policy_is_published_once_and_held_by_nobody(world: World, tmp_path: Path) -> None:
    tiny_model(tmp_path)
    overrides = ["policies.judge={model: {from_policy: solver}, train: false}"]
    run = await create_run(world, folder=tmp_path, steps=1, overrides=overrides)
    judge = TrainerProcess(world.address, tmp_path, name="judge", policy="judge")
    for life in range(2):
        await judge.lives()
        found = {item.policy_id: item for item in (await world.status()).policies}["judge"]
        assert (found.version.version, found.frozen, found.trainer_epoch) == (0, True, life + 1)
    await Trainer(world, "judge").claim(trainer_id="another", only_if_unheld=True)
    log = read_log(open_store(run.store_uri), "judge", run_id="run")
    assert [record.version for record in log.records] == [0]
