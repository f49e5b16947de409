"""What an operator asks of a real trainer process holds: in the step after, across a kill, and until it is undone."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import grpc
import pytest

from astraflow.trainer.v1 import trainer_service_pb2 as pb
from astraflow.trainer.v1 import trainer_service_pb2_grpc
from support import trainer_process as trainers
from support.dataflow_world import World
from support.scripted_dataflow import eventually
from support.trainer_process import GROUPS_PER_STEP, TrainerProcess, forking, newest_checkpoint, valkey

__all__ = ["forking", "valkey"]

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(400)]

PATIENCE_S = 120.0
Service: TypeAlias = "trainer_service_pb2_grpc.TrainerServiceAsyncStub"


@pytest.fixture
async def trainer(world: World, tmp_path: Path) -> AsyncIterator[TrainerProcess]:
    """A trainer that writes no checkpoint of its own accord."""
    await trainers.create_run(world, folder=tmp_path, steps=50, checkpoint_every_steps=50)
    process = TrainerProcess(world.address, tmp_path)
    yield process
    process.kill()


@asynccontextmanager
async def service(trainer: TrainerProcess) -> AsyncIterator[Service]:
    """Start a life of the trainer and talk to it."""
    trainer.start()

    await eventually(lambda: trainer.grpc_address, what="it serves", patience_s=PATIENCE_S)
    async with grpc.aio.insecure_channel(trainer.grpc_address or "") as channel:
        yield trainer_service_pb2_grpc.TrainerServiceStub(channel)


async def status_where(stub: Service, holds: Callable[[pb.StatusResponse], bool]) -> pb.StatusResponse:
    """Its status, as soon as this holds of it."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds(status := await stub.Status(pb.StatusRequest(), timeout=PATIENCE_S)):
            pass  # each question travels to another process
    return status


async def test_a_learning_rate_a_checkpoint_and_a_pause(world: World, trainer: TrainerProcess) -> None:
    async with service(trainer) as stub:
        await trainers.push_groups(world, count=2 * GROUPS_PER_STEP)
        await status_where(stub, lambda status: status.step >= 2)
        request = pb.SetLearningRateRequest(learning_rate=0.0625)
        changed = await stub.SetLearningRate(request, timeout=PATIENCE_S)
        assert (changed.first_step, changed.previous_learning_rate) == (3, 0.01)
        assert newest_checkpoint(trainer.work_dir)[0] == 2
        saved = await stub.Checkpoint(pb.CheckpointRequest(), timeout=PATIENCE_S)
        status = await stub.Status(pb.StatusRequest(), timeout=PATIENCE_S)
        assert (saved.step, status.durable_step, status.learning_rate) == (2, 2, 0.0625)

        assert (await stub.Pause(pb.PauseRequest(reason="lunch"), timeout=PATIENCE_S)).step == 2
        await trainers.push_groups(world, count=GROUPS_PER_STEP, seed=1)
        status = await status_where(stub, lambda status: status.waiting_for == "paused")
        assert (status.step, status.pause_reason) == (2, "lunch")
        account = (await world.status()).trajectories
        a_step = GROUPS_PER_STEP * trainers.GROUP_SIZE
        assert (account.trained, account.ready + account.in_batch) == (2 * a_step, a_step)
    trainer.kill()
    await trainer.exits_with(trainers.KILLED)

    async with service(trainer) as stub:
        status = await status_where(stub, lambda status: status.step >= 3)
        assert (status.HasField("pause_reason"), status.learning_rate) == (False, 0.0625)
        watch = stub.WatchMetrics(pb.WatchMetricsRequest(after_step=2), timeout=PATIENCE_S)
        assert (await watch.read()).metrics["learning_rate"] == 0.0625
        assert (await stub.StopAfterStep(pb.StopAfterStepRequest(), timeout=PATIENCE_S)).step == 3
    await trainer.exits_with(0)
    assert newest_checkpoint(trainer.work_dir)[0] == 3
