"""A run forked from another after a step: the same weights, or weights and optimizer, in a run of its own."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from astraflow.dataflow.v1 import version_service_pb2
from astraflow_trainer.model.checkpoint import read_positions
from astraflow_weights.store import open_store
from support import cli
from support import trainer_process as trainers
from support.cli import Ended
from support.dataflow_world import World
from support.published_models import read_log
from support.trainer_process import POLICY, TrainerProcess, forking, valkey

__all__ = ["forking", "valkey"]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet"), pytest.mark.timeout(300)]


async def fork(world: World, *arguments: str, status: int = 0) -> Ended:
    """Run `astraflow runs fork ARGUMENTS` in a thread beside the server's loop; it ends with this status."""
    ended = await asyncio.to_thread(cli.run, "runs", "fork", *arguments, "--join", world.address)
    assert ended.status == status, ended.errors
    return ended


async def pins(world: World) -> dict[int, str]:
    """Reasons by pinned version of the source."""
    request: dict[str, Any] = {"run_id": "run", "policy_id": POLICY}
    found = await world.ask(version_service_pb2.ListVersionsResponse, **request)
    return {pin.version: pin.reason for pin in found.pins}


@pytest.fixture
async def source(world: World, tmp_path: Path) -> TrainerProcess:
    """The trainer of a run of four steps, with a checkpoint of each second one."""
    kept = ["trainer.keep_checkpoints=5"]
    await trainers.create_run(world, folder=tmp_path, steps=4, checkpoint_every_steps=2, overrides=kept)
    trainer = TrainerProcess(world.address, tmp_path, name="source")
    async with trainers.recorded(world, trainer, steps=4):
        await trainer.lives()
    return trainer


async def test_a_fork_begins_with_the_weights_and_the_optimizer_of_its_step(
    world: World, tmp_path: Path, source: TrainerProcess
) -> None:
    made = await fork(world, "run", "forked", "--from-step", "2", "--set", "run.steps=2", "--json")
    assert (made.json["run_id"], made.json["starts"][POLICY]["version"]) == ("forked", 2)
    assert await pins(world) == {2: "run forked starts from it"}
    again = await fork(world, "run", "forked", "--from-step", "2", "--set", "run.steps=2")
    line = "solver starts with version 2 of policy solver of run run, after step 2"
    assert line in again.output, "the same command again leaves it as it is"
    shown = await asyncio.to_thread(cli.run, "runs", "show", "forked", "--join", world.address)
    assert line in shown.output
    world.run_id = "forked"
    origin = (await world.status()).policies[0].origin
    assert (origin.run_id, origin.policy_id, origin.version, origin.step) == ("run", POLICY, 2, 2)
    trainer = TrainerProcess(world.address, tmp_path, name="forked", run_id="forked")
    async with trainers.recorded(world, trainer, steps=2):
        await trainer.lives(source_work_dir=str(source.work_dir))
    assert "of the checkpoint of step 2" in trainer.log
    store = open_store((tmp_path / "run.store").as_uri())
    old, new = read_log(store, run_id="run"), read_log(store, run_id="forked")
    assert new.records[0].model_root == old.records[2].model_root
    assert [record.step for record in new.records] == [0, 1, 2]
    newest = read_positions(trainer.work_dir / "checkpoints")[-1]
    assert (newest.step, newest.optimizer_steps) == (2, 4), "the schedule goes on where the checkpoint was"
    assert len(old.records) == 5


async def test_without_a_checkpoint_the_optimizer_starts_fresh_and_says_so(
    world: World, tmp_path: Path, source: TrainerProcess
) -> None:
    made = await fork(world, "run", "forked", "--from-step", "3", "--set", "run.steps=1")
    assert "--source-work-dir FOLDER" in made.errors
    world.run_id = "forked"
    trainer = TrainerProcess(world.address, tmp_path, name="forked", run_id="forked")
    async with trainers.recorded(world, trainer, steps=1):
        await trainer.lives(source_work_dir=str(source.work_dir), status=2)
        assert "no checkpoint of step 3 with version 3; it has step 2 (version 2), step 4" in trainer.log
        await trainer.lives()
    assert '"optimizer":"fresh"' in trainer.log.replace(" ", "")
    assert read_positions(trainer.work_dir / "checkpoints")[-1].optimizer_steps == 1


async def test_what_cannot_be_forked_is_refused_and_pins_nothing(world: World) -> None:
    trainer, node = await world.started(dataset="Unevaluated")
    for step in (1, 2):
        await node.make_ready(2)
        await trainer.train(step, base_version=step - 1)
    refused = [
        (("gone", "forked", "--from-step", "1"), "gone"),
        (("run", "run", "--from-step", "1"), "give it another name"),
        (("run", "forked", "--from-step", "9"), "has finished 2 steps"),
        (("run", "forked", "--from-step", "1", "--set", "run.stepz=1"), "--set run.stepz=1: run.stepz"),
        (("run", "forked", "--from-step", "1", "--store", "file://x"), "with three slashes"),
        (("run", "forked", "--from-step", "1"), "is no folder of this machine"),
    ]
    for arguments, words in refused:
        assert words in (await fork(world, *arguments, status=2)).errors
    assert await pins(world) == {}
    await fork(world, "run", "forked", "--from-step", "1", "--no-probe")
    other = await fork(world, "run", "forked", "--from-step", "2", "--no-probe", status=1)
    assert "run forked exists with another recipe" in other.errors
    assert await pins(world) == {1: "run forked starts from it"}
