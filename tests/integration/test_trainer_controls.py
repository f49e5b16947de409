"""What an operator asks of a real trainer process holds: in the step after, across a kill, and until it is undone."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import grpc
import pytest

from astraflow.trainer.v1 import trainer_service_pb2 as pb
from astraflow.trainer.v1 import trainer_service_pb2_grpc
from support.dataflow_world import World, until
from support.trainer_process import (
    GROUP_SIZE,
    GROUPS_PER_STEP,
    KILLED,
    TrainerProcess,
    create_run,
    forking,
    newest_checkpoint,
    push_groups,
    valkey,
)

__all__ = ["forking", "valkey"]

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(400)]

PATIENCE_S = 120.0
Service: TypeAlias = "trainer_service_pb2_grpc.TrainerServiceAsyncStub"


@pytest.fixture
async def trainer(world: World, tmp_path: Path) -> AsyncIterator[TrainerProcess]:
    """A trainer that writes no checkpoint of its own accord."""
    await create_run(world, folder=tmp_path, steps=50, checkpoint_every_steps=50)
    process = TrainerProcess(world.address, tmp_path)
    yield process
    process.kill()


@asynccontextmanager
async def service(trainer: TrainerProcess) -> AsyncIterator[Service]:
    """Start a life of the trainer and talk to it."""
    trainer.start()

    async def is_serving() -> bool:
        return trainer.grpc_address is not None

    await until(is_serving, within_s=PATIENCE_S)
    async with grpc.aio.insecure_channel(trainer.grpc_address or "") as channel:
        yield trainer_service_pb2_grpc.TrainerServiceStub(channel)


async def status_of(stub: Service) -> pb.StatusResponse:
    return await stub.Status(pb.StatusRequest(), timeout=PATIENCE_S)


async def step_taken(stub: Service, step: int) -> None:
    async def has_it() -> bool:
        return (await status_of(stub)).step >= step

    await until(has_it, within_s=PATIENCE_S)


async def test_a_learning_rate_a_checkpoint_and_a_pause(world: World, trainer: TrainerProcess) -> None:
    async with service(trainer) as stub:
        await push_groups(world, count=2 * GROUPS_PER_STEP)
        await step_taken(stub, 2)
        request = pb.SetLearningRateRequest(learning_rate=0.0625)
        changed = await stub.SetLearningRate(request, timeout=PATIENCE_S)
        assert (changed.first_step, changed.previous_learning_rate) == (3, 0.01)
        assert newest_checkpoint(trainer.work_dir)[0] == 2
        saved = await stub.Checkpoint(pb.CheckpointRequest(), timeout=PATIENCE_S)
        status = await status_of(stub)
        assert (saved.step, status.durable_step, status.learning_rate) == (2, 2, 0.0625)

        assert (await stub.Pause(pb.PauseRequest(reason="lunch"), timeout=PATIENCE_S)).step == 2
        await push_groups(world, count=GROUPS_PER_STEP, seed=1)

        async def is_paused() -> bool:
            return (await status_of(stub)).waiting_for == "paused"

        await until(is_paused, within_s=PATIENCE_S)
        status = await status_of(stub)
        assert (status.step, status.pause_reason) == (2, "lunch")
        account = (await world.status()).trajectories
        waiting = account.ready + account.in_batch
        assert (account.trained, waiting) == (2 * GROUPS_PER_STEP * GROUP_SIZE, GROUPS_PER_STEP * GROUP_SIZE)
    trainer.kill()
    await trainer.exits_with(KILLED)

    async with service(trainer) as stub:
        await step_taken(stub, 3)
        status = await status_of(stub)
        assert (status.HasField("pause_reason"), status.learning_rate) == (False, 0.0625)
        watch = stub.WatchMetrics(pb.WatchMetricsRequest(after_step=2), timeout=PATIENCE_S)
        assert (await watch.read()).metrics["learning_rate"] == 0.0625
        assert (await stub.StopAfterStep(pb.StopAfterStepRequest(), timeout=PATIENCE_S)).step == 3
    await trainer.exits_with(0)
    assert newest_checkpoint(trainer.work_dir)[0] == 3
