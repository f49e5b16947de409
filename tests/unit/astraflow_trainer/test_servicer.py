"""TrainerService over a real server: snapshots, the stop request, and metrics that miss no step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import grpc
import pytest

from astraflow.trainer.v1 import trainer_service_pb2, trainer_service_pb2_grpc
from astraflow_trainer.progress import Phase, Progress, StepRecord
from astraflow_trainer.servicer import TrainerServicer

RECORD = StepRecord(
    step=1, version=1, finished_at_s=10.5, wait_s=0.25, train_s=2.5, metrics={"reward_mean": 0.5}
)
PATIENCE_S = 10.0


def _servicer(progress: Progress, *, last_step: int = 0) -> TrainerServicer:
    return TrainerServicer(progress, run_id="run-1", policy_id="solver", stop_after_step=lambda: last_step)


@asynccontextmanager
async def _serving(
    servicer: TrainerServicer,
) -> AsyncIterator[trainer_service_pb2_grpc.TrainerServiceAsyncStub]:
    server = grpc.aio.server()
    trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield trainer_service_pb2_grpc.TrainerServiceStub(channel)
    finally:
        await server.stop(None)


async def test_status_is_the_snapshot_of_the_trainer() -> None:
    progress = Progress()
    progress.claimed(epoch=3, step=7, version=6)
    progress.waiting("ready_groups")
    async with _serving(_servicer(progress)) as stub:
        status = await stub.Status(trainer_service_pb2.StatusRequest(), timeout=PATIENCE_S)
    assert (status.run_id, status.policy_id) == ("run-1", "solver")
    assert status.phase == trainer_service_pb2.PHASE_WAITING
    assert (status.waiting_for, status.progress) == ("ready_groups", 1.0)
    assert (status.step, status.version, status.trainer_epoch) == (7, 6, 3)
    assert status.wait_fraction == pytest.approx(1.0)


async def test_status_has_no_version_before_the_first_is_published() -> None:
    async with _serving(_servicer(Progress())) as stub:
        status = await stub.Status(trainer_service_pb2.StatusRequest(), timeout=PATIENCE_S)
    assert not status.HasField("version")


@pytest.mark.parametrize("phase", list(Phase))
async def test_every_phase_has_its_name_in_the_contract(phase: Phase) -> None:
    progress = Progress()
    progress.ended(phase)
    context = cast("Any", None)
    status = await _servicer(progress).Status(trainer_service_pb2.StatusRequest(), context)
    assert trainer_service_pb2.Phase.Name(status.phase) == f"PHASE_{phase.name}"


async def test_a_stop_request_returns_the_last_step_that_will_be_taken() -> None:
    async with _serving(_servicer(Progress(), last_step=12)) as stub:
        request = trainer_service_pb2.StopAfterStepRequest()
        assert (await stub.StopAfterStep(request, timeout=PATIENCE_S)).step == 12


async def test_metrics_come_from_the_asked_step_on_and_end_with_training() -> None:
    progress = Progress()
    for step in (1, 2, 3):
        progress.stepped(replace(RECORD, step=step, version=None if step == 2 else step))
    received: list[trainer_service_pb2.WatchMetricsResponse] = []
    async with _serving(_servicer(progress)) as stub, asyncio.timeout(PATIENCE_S):
        watch = stub.WatchMetrics(trainer_service_pb2.WatchMetricsRequest(after_step=1))
        async for message in watch:
            received.append(message)
            if message.step == 3:
                progress.stepped(replace(RECORD, step=4, version=4))
                progress.ended(Phase.FINISHED)
    assert [message.step for message in received] == [2, 3, 4]
    assert [message.HasField("version") for message in received] == [False, True, True]
    last = received[-1]
    assert last.finish_time.ToNanoseconds() == 10_500_000_000
    assert (last.wait_duration.ToMilliseconds(), last.train_duration.ToMilliseconds()) == (250, 2500)
    assert dict(last.metrics) == {"reward_mean": 0.5}


async def test_a_slow_reader_gets_the_steps_that_finished_while_it_was_reading() -> None:
    """Training may end between two messages; what finished in between must still be sent."""
    progress = Progress()
    progress.stepped(RECORD)
    context = cast("Any", None)
    stream = _servicer(progress).WatchMetrics(trainer_service_pb2.WatchMetricsRequest(), context)
    steps = [(await anext(stream)).step]
    progress.stepped(replace(RECORD, step=2))
    progress.ended(Phase.FINISHED)
    async with asyncio.timeout(PATIENCE_S):
        steps += [message.step async for message in stream]
    assert steps == [1, 2]
