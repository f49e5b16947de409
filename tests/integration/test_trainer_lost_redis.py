"""A Redis that came back older or empty: nobody trains on, nothing is deleted, and a person decides.

A real Valkey whose append-only file is cut to where it stood steps ago, or removed; server and trainer are real.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from astraflow.dataflow.v1 import run_pb2, run_service_pb2
from astraflow.dataflow.v1.admin_service_pb2 import Wait
from astraflow_kit.lifecycle import ExitCode
from support import trainer_process as trainers
from support.dataflow_process import DataflowProcess
from support.dataflow_world import World
from support.trainer_process import TrainerProcess, forking
from support.valkey import ValkeyServer

__all__ = ["forking"]

STEPS, MORE_STEPS = 6, 7
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@dataclass
class Scene:
    """A run of six steps; `size` is what the append-only file had when step 3 began."""

    redis: ValkeyServer
    server: DataflowProcess
    world: World
    run: run_pb2.Run
    trainer: TrainerProcess
    size: int = 0

    @property
    def copy(self) -> Path:
        """The data of Redis after the last step."""
        return self.redis.folder.with_name("copy")

    async def train(self) -> None:
        """Take all steps, and keep the data of Redis as it was in step 3 and at the end."""
        self.trainer.start(failpoints="trainer.intent_recorded=stop@3")
        pushing = asyncio.create_task(
            trainers.push_groups(self.world, count=STEPS * trainers.GROUPS_PER_STEP)
        )
        await self.trainer.frozen()
        self.size = self.redis.log_bytes
        self.trainer.go_on()
        await pushing
        await self.trainer.exits_with(0)
        self.redis.kill()
        shutil.copytree(self.redis.folder, self.copy)

    def files(self) -> dict[str, bytes]:
        """Store and checkpoints, file by file; the store's probe and lock files apart."""
        folders = [self.trainer.work_dir / "checkpoints", Path(self.run.store_uri.removeprefix("file://"))]
        paths = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
        return {str(path): path.read_bytes() for path in paths}

    async def doubt(self) -> Wait:
        """Why the run waits: a trainer that does not go on."""
        return (await self.world.waits())["state_in_doubt"]


@pytest.fixture
async def scene(own_valkey: ValkeyServer, tmp_path: Path) -> AsyncIterator[Scene]:
    """The run has ended, and its Redis is down."""
    server = DataflowProcess(own_valkey.url, tmp_path)
    server.start()
    trainer = TrainerProcess(server.address, tmp_path)
    try:
        async with server.world(retry_s=60) as world:
            run = await trainers.create_run(world, folder=tmp_path, steps=STEPS)
            made = Scene(own_valkey, server, world, run, trainer)
            await made.train()
            yield made
    finally:
        trainer.kill()
        server.kill()


def cut(scene: Scene) -> None:
    """Redis comes back as it was in step 3."""
    scene.redis.truncate_log(scene.size)
    scene.redis.start()


async def test_a_redis_of_steps_ago_is_refused_and_the_right_one_goes_on(scene: Scene) -> None:
    cut(scene)
    before = scene.files()
    await scene.trainer.lives(status=ExitCode.SUPERSEDED, steps=MORE_STEPS)
    assert scene.files() == before
    doubt = await scene.doubt()
    assert "steps up to 2" in doubt.detail
    assert "the newest checkpoint is of step 6" in doubt.detail
    assert doubt.detail in scene.trainer.log.encode().decode("unicode_escape")
    scene.redis.kill()
    shutil.rmtree(scene.redis.folder)
    shutil.copytree(scene.copy, scene.redis.folder)
    scene.redis.start()
    await scene.world.until(lambda now: now.policies[0].last_finished_step == STEPS)
    await scene.world.resume()
    pushing = asyncio.create_task(trainers.push_groups(scene.world, count=trainers.GROUPS_PER_STEP, seed=1))
    await scene.trainer.lives(steps=MORE_STEPS)
    await pushing
    assert trainers.census_of(scene.run).steps == list(range(MORE_STEPS + 1))
    await trainers.require_trained(scene.world, steps=MORE_STEPS)


async def test_an_accepted_loss_goes_on_after_the_checkpoint_and_uses_no_version_twice(scene: Scene) -> None:
    cut(scene)
    before = scene.files()
    pushing = asyncio.create_task(trainers.push_groups(scene.world, count=trainers.GROUPS_PER_STEP, seed=1))
    await scene.trainer.lives(steps=MORE_STEPS, accept_data_loss=True)
    await pushing
    assert trainers.census_of(scene.run).steps == list(range(MORE_STEPS + 1))
    assert {name for name in before if "/parts/" in name} <= scene.files().keys()
    status = await scene.world.until(lambda now: now.policies[0].last_finished_step == MORE_STEPS)
    assert status.policies[0].version.version == MORE_STEPS
    assert status.trajectories.dropped["voided"] == trainers.GROUPS_PER_STEP * trainers.GROUP_SIZE
    assert status.trajectories.conservation_error == 0
    assert "state_in_doubt" not in {wait.reason for wait in status.waits}


async def test_a_redis_that_is_emptied_under_a_trainer_ends_it_with_status_3(
    own_valkey: ValkeyServer, tmp_path: Path
) -> None:
    server = DataflowProcess(own_valkey.url, tmp_path)
    server.start()
    trainer = TrainerProcess(server.address, tmp_path)
    try:
        async with server.world(retry_s=60) as world:
            await trainers.create_run(world, folder=tmp_path, steps=STEPS)
            trainer.start(failpoints="trainer.intent_recorded=stop@1")
            await trainers.push_groups(world, count=trainers.GROUPS_PER_STEP)
            await trainer.frozen()
            with redis.Redis.from_url(own_valkey.url) as emptying:
                emptying.flushall()
            trainer.go_on()
            await trainer.exits_with(ExitCode.SUPERSEDED)
    finally:
        trainer.kill()
        server.kill()
    assert "Redis was emptied, or the run was deleted: put that Redis back" in trainer.log


async def test_an_emptied_redis_is_another_run_of_that_name(scene: Scene) -> None:
    shutil.rmtree(scene.redis.folder)
    scene.redis.start()
    scene.server.kill()
    scene.server.start()
    await scene.world.ask(run_service_pb2.CreateRunResponse, run=scene.run)
    before = scene.files()
    await scene.trainer.lives(status=ExitCode.SUPERSEDED)
    assert scene.files() == before
    doubt = await scene.doubt()
    assert f"not {scene.run.identity}: its Redis is not the one" in doubt.detail
    pushing = asyncio.create_task(trainers.push_groups(scene.world, count=trainers.GROUPS_PER_STEP, seed=1))
    await scene.trainer.lives(steps=MORE_STEPS, accept_data_loss=True)
    await pushing
    assert trainers.census_of(scene.run).steps == list(range(MORE_STEPS + 1))
    assert (await scene.world.status()).trajectories.conservation_error == 0
    await scene.trainer.lives(steps=MORE_STEPS)
