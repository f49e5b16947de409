"""The life of a run without the launcher: created by command, over after its last step, finished and resumed."""

import asyncio
from pathlib import Path
from uuid import uuid4

import pytest

from astraflow.commands.run_creation import run_of
from astraflow.dataflow.v1 import run_pb2, run_service_pb2
from astraflow.recipe.file import load_recipe
from support.cli import Ended, run
from support.dataflow_world import Trainer, World
from support.s3_server import S3Server

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("quiet")]


async def astraflow(world: World, *arguments: str, status: int = 0) -> Ended:
    """Run `astraflow ARGUMENTS --join SERVER` in a thread beside the server's loop; it ends with this status."""
    ended = await asyncio.to_thread(run, *arguments, "--join", world.address)
    assert ended.status == status, ended.errors
    return ended


async def train_and_save(trainer: Trainer, step: int) -> None:
    """Take a step, announce its version, and mark it durable."""
    await trainer.train(step, base_version=step - 1)
    await trainer.mark_durable(step)


async def test_a_shipped_recipe_becomes_a_run_and_the_same_command_leaves_it_alone(
    world: World, tmp_path: Path
) -> None:
    store = (tmp_path / "store").as_uri()
    command = ("runs", "create", "quickstart", "--store", store, "--run-id", "first", "--set", "run.steps=7")
    created = await astraflow(world, *command)
    assert created.output == "run first is active\n"
    assert f"{store} keeps create-only writes" in created.errors
    again = await astraflow(world, *command, "--json")
    assert (again.json["run_id"], again.json["state"], again.json["store_uri"]) == ("first", "active", store)
    shown = await astraflow(world, "runs", "show", "first")
    assert "steps: 7" in shown.output
    other = await astraflow(world, *command[:-1], "run.steps=8", status=1)
    assert "run first exists with another recipe (run.steps: 7 → 8); choose" in other.errors
    moved = (tmp_path / "moved").as_uri()
    elsewhere = await astraflow(world, *command[:4], moved, *command[5:], status=1)
    assert f"run first exists with another store ({store}, not {moved}); choose" in elsewhere.errors


async def test_a_run_of_another_release_is_found_and_what_that_had_as_defaults_is_said(
    world: World, tmp_path: Path
) -> None:
    store, recipe = (tmp_path / "store").as_uri(), Path("quickstart")
    run = run_of(load_recipe(recipe), run_id="first", store_uri=store)
    run.recipe_yaml = load_recipe(recipe, overrides=["trainer.keep_checkpoints=9"]).yaml_text
    await world.client.call(world.client.runs.CreateRun, run_service_pb2.CreateRunRequest(run=run))
    found = await astraflow(world, "runs", "create", "quickstart", "--store", store, "--run-id", "first")
    assert found.output == "run first is active\n"
    assert (
        "trainer.keep_checkpoints stays 9, as the run was created; the default of this release is 2"
        in found.errors
    )
    again = await astraflow(world, "runs", "show", "first")
    assert "keep_checkpoints: 9" in again.output


async def test_the_bucket_of_a_new_run_is_made_and_one_that_may_not_be_is_named(
    world: World, tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    store = f"s3://{uuid4().hex}/runs"
    made = await astraflow(world, "runs", "create", "quickstart", "--store", store)
    assert f"{store} keeps create-only writes (its bucket is new)" in made.errors
    refused = await astraflow(
        world, "runs", "create", "quickstart", "--run-id", "x", "--store", "s3://x/x", status=2
    )
    assert "there is no bucket 'x', and it could not be created (InvalidBucketName)" in refused.errors
    assert "Traceback" not in refused.errors


async def test_a_run_ends_when_a_checkpoint_covers_the_last_step_of_every_policy(world: World) -> None:
    await world.create_run(dataset="Unevaluated", policies=("solver", "critic"))
    node = await world.node()
    trainers = {name: await world.trainer(name) for name in ("solver", "critic")}
    for trainer in trainers.values():
        await trainer.claim(last_step=1)
    await node.make_ready(2, policies=tuple(trainers))
    await train_and_save(trainers["solver"], 1)
    assert (await world.status()).state == run_pb2.RUN_STATE_ACTIVE
    await trainers["critic"].train(1, base_version=0)
    assert (await world.status()).state == run_pb2.RUN_STATE_ACTIVE, (
        "a killed trainer would take the step again"
    )
    await trainers["critic"].mark_durable(1)
    assert (await world.status()).state == run_pb2.RUN_STATE_FINISHING


async def test_whoever_follows_a_run_sees_its_last_step_and_its_end(world: World) -> None:
    trainer, node = await world.started(dataset="Unevaluated")
    await trainer.claim(last_step=1)
    await node.make_ready(2)
    await train_and_save(trainer, 1)
    following = asyncio.create_task(astraflow(world, "runs", "wait", "run"))
    assert "run run is finished: solver step 1, version 1" in (await following).output


async def test_stop_tells_the_trainer_and_resume_lets_it_go_on(world: World) -> None:
    trainer, node = await world.started(dataset="Unevaluated")
    await node.make_ready(2)
    finished = await astraflow(world, "runs", "stop", "run", "--wait")
    assert "run run is finished" in finished.output
    assert (await trainer.acquire(1, wait_s=20)).waiting_for == "run_finished"
    assert (await astraflow(world, "runs", "resume", "run")).output == "run run is active\n"
    await trainer.claim(last_step=1)
    await node.make_ready(2)
    assert (await trainer.acquire(1)).batch.step == 1


async def test_a_resumed_run_waits_for_every_trainer_to_say_how_far_it_goes(world: World) -> None:
    trainer, node = await world.started(dataset="Unevaluated")
    await trainer.claim(last_step=1)
    await node.make_ready(2)
    await train_and_save(trainer, 1)
    await world.until(lambda status: status.state == run_pb2.RUN_STATE_FINISHED)
    await astraflow(world, "runs", "resume", "run")
    await trainer.claim()
    await trainer.mark_durable(1)
    assert (await world.status()).state == run_pb2.RUN_STATE_ACTIVE
