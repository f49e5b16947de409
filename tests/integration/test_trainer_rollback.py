"""A trainer that starts after a rollback goes on from the old weights, and never brings back those given up.

Real trainer processes over a real dataflow server, and the real command between their lives.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from astraflow_kit.failpoints import read_hits
from astraflow_weights.codec.tensors import Array
from astraflow_weights.store import open_store
from astraflow_weights.versions.inspection import build_version
from support import cli, ledger_audit, published_models, weight_models
from support import trainer_process as trainers
from support.dataflow_world import World
from support.trainer_process import (
    KILLED,
    TrainerProcess,
    census_of,
    forking,
    newest_checkpoint,
    read_checkpoint,
    valkey,
)

__all__ = ["forking", "valkey"]

STEPS = 6
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]


def weights_of(store_uri: str, version: int) -> dict[str, Array]:
    """A version as a node would get it."""
    store = open_store(store_uri)
    return build_version(store, published_models.read_log(store, run_id="run"), target=version, threads=2)


def rounded(checkpoint: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    """The bits that a checkpoint's masters publish."""
    return {
        name.removeprefix("master."): tensor.to(torch.bfloat16).view(torch.uint16).numpy()
        for name, tensor in checkpoint.items()
        if name.startswith("master.")
    }


def moments(checkpoint: Mapping[str, torch.Tensor]) -> float:
    """Sum of the optimizer's second moments; 0 for a fresh one."""
    return sum(float(tensor.sum()) for name, tensor in checkpoint.items() if name.startswith("exp_avg_sq."))


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("death", "back_to", "optimizer"),
    [
        # Version 5 is announced: gone back to the weights of a checkpoint, or to others. That of step 2 is whole, for
        # the next one was begun.
        ("trainer.announced@6", 2, "of the checkpoint of step 2"),
        ("trainer.announced@6", 1, "fresh"),
        # Step 5 is finished and its weights died with the trainer.
        pytest.param("trainer.step_acked@5", 2, "of the checkpoint of step 2", marks=pytest.mark.ci),
        pytest.param("trainer.step_acked@5", 0, "fresh", marks=pytest.mark.ci),
    ],
)
async def test_a_trainer_goes_on_from_the_weights_that_were_gone_back_to(
    world: World, tmp_path: Path, death: str, back_to: int, optimizer: str
) -> None:
    run = await trainers.create_run(world, folder=tmp_path, steps=STEPS, checkpoint_every_steps=2)
    trainer = TrainerProcess(world.address, tmp_path)
    async with trainers.recorded(world, trainer, steps=STEPS):
        await trainer.lives(failpoints=death.replace("@", "=kill@"), status=KILLED)
        finished = (await world.status()).policies[0].last_finished_step
        (second,) = (trainer.work_dir / "checkpoints").glob("step-*2")
        held = read_checkpoint(second)
        command = ("weights", "rollback", str(back_to), "--join", world.address, "--json")
        assert (await asyncio.to_thread(cli.run, *command)).status == 1, "it may still live"
        told = await asyncio.to_thread(cli.run, *command, "--take-over")
        assert told.status == 0, told.errors
        number_of = told.json["version"]

        await trainer.lives(failpoints="trainer.checkpoint_written=kill@1", status=KILLED)
        assert read_hits(trainer.failpoints_log)[-1].name == "trainer.checkpoint_written"
        assert f'"optimizer": "{optimizer}"' in trainer.log
        step, checkpoint = newest_checkpoint(trainer.work_dir)
        assert step == finished, "steps that were taken stay taken"
        old = weights_of(run.store_uri, back_to)
        assert weight_models.same_model(rounded(checkpoint), old)
        assert (moments(checkpoint) > 0) is (optimizer != "fresh")
        if optimizer != "fresh":
            assert all(torch.equal(checkpoint[key], held[key]) for key in held)

        await trainer.lives()
    census = census_of(run)
    rollbacks = [record.rollback_of for record in census.records[number_of:]]
    assert rollbacks == [back_to] + [None] * (STEPS - finished)
    assert census.steps[number_of + 1 :] == list(range(finished + 1, STEPS + 1))
    given_up = {record.model_root for record in census.records[back_to + 1 : number_of]}
    assert given_up.isdisjoint(record.model_root for record in census.records[number_of:])
    assert ledger_audit.audit(trainer.ledger).last_step == STEPS
    status = await world.status()
    assert status.policies[0].version.version == len(census.records) - 1
    assert status.policies[0].unpublished_groups == 0
    await trainers.require_trained(world, steps=STEPS)


@pytest.mark.timeout(240)
async def test_a_trainer_that_ended_lets_go_and_resumes_after_a_rollback_without_replaying(
    world: World, tmp_path: Path
) -> None:
    run = await trainers.create_run(world, folder=tmp_path, steps=4, checkpoint_every_steps=2)
    trainer = TrainerProcess(world.address, tmp_path)
    async with trainers.recorded(world, trainer, steps=4):
        await trainer.lives()
        told = await asyncio.to_thread(cli.run, "weights", "rollback", "2", "--join", world.address, "--json")
        assert (told.status, told.json["version"]) == (0, 5), told.errors
        await trainer.lives()
        before = newest_checkpoint(trainer.work_dir)
        # Once more: the checkpoint knows of the rollback now.
        await trainer.lives()
    census = census_of(run)
    assert census.steps == [0, 1, 2, 3, 4, 4]
    step, checkpoint = newest_checkpoint(trainer.work_dir)
    assert step == before[0] == 4
    assert weight_models.same_model(rounded(checkpoint), weights_of(run.store_uri, 2))
    assert ledger_audit.audit(trainer.ledger).num_replayed == 0
