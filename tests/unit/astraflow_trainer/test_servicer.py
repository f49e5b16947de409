"""TrainerService over a real server: snapshots, the stop request, and metrics that miss no step."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import grpc
import pytest

from astraflow._status import from_rpc_error
from astraflow.errors import AstraflowError
from astraflow.trainer.v1 import trainer_service_pb2, trainer_service_pb2_grpc
from astraflow_kit.metrics import Metrics
from astraflow_kit.serve import GrpcServer
from astraflow_kit.settings import DaemonSettings
from astraflow_trainer.controls import Controls, Orders, RateChange
from astraflow_trainer.progress import Phase, Progress, StepRecord
from astraflow_trainer.servicer import TrainerServicer
from support.scripted_dataflow import eventually

RECORD = StepRecord(
    step=1, version=1, finished_at_s=10.5, wait_s=0.25, train_s=2.5, metrics={"reward_mean": 0.5}
)
PATIENCE_S = 10.0


def _servicer(progress: Progress, controls: Controls | None = None) -> TrainerServicer:
    return TrainerServicer(progress, controls or Controls(), run_id="run-1", policy_id="solver")


async def _refused(call: Awaitable[object]) -> AstraflowError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return from_rpc_error(refused.value)


@asynccontextmanager
async def _serving(
    servicer: TrainerServicer,
) -> AsyncIterator[trainer_service_pb2_grpc.TrainerServiceAsyncStub]:
    add = trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server
    server = GrpcServer([(add, servicer)], settings=DaemonSettings(), metrics=Metrics())
    await server.start()
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            yield trainer_service_pb2_grpc.TrainerServiceStub(channel)
    finally:
        await server.stop(deadline_s=1.0)


async def test_status_is_the_snapshot_of_the_trainer() -> None:
    progress = Progress()
    progress.claimed(epoch=3, step=7, version=6)
    progress.resumed(durable_step=5, learning_rate=0.25)
    progress.waiting("ready_groups")
    async with _serving(_servicer(progress)) as stub:
        status = await stub.Status(trainer_service_pb2.StatusRequest(), timeout=PATIENCE_S)
    assert (status.run_id, status.policy_id) == ("run-1", "solver")
    assert status.phase == trainer_service_pb2.PHASE_WAITING
    assert (status.waiting_for, status.progress) == ("ready_groups", 1.0)
    assert (status.step, status.version, status.trainer_epoch) == (7, 6, 3)
    assert status.wait_fraction == pytest.approx(1.0)
    assert (status.durable_step, status.learning_rate) == (5, 0.25)


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
    controls = Controls()
    controls.at(12)
    async with _serving(_servicer(Progress(), controls)) as stub:
        request = trainer_service_pb2.StopAfterStepRequest()
        assert (await stub.StopAfterStep(request, timeout=PATIENCE_S)).step == 12
        late = await _refused(stub.Pause(trainer_service_pb2.PauseRequest(), timeout=PATIENCE_S))
    assert late.reason == "FAILED_PRECONDITION"


async def test_a_pause_is_shown_with_its_reason_until_it_ends() -> None:
    controls, status = Controls(), trainer_service_pb2.StatusRequest()
    controls.at(3)
    async with _serving(_servicer(Progress(), controls)) as stub:
        assert not (await stub.Status(status, timeout=PATIENCE_S)).HasField("pause_reason")
        for reason in ("disk", "disk is full"):
            request = trainer_service_pb2.PauseRequest(reason=reason)
            assert (await stub.Pause(request, timeout=PATIENCE_S)).step == 3
        assert (await stub.Status(status, timeout=PATIENCE_S)).pause_reason == "disk is full"
        for _ in range(2):
            assert (await stub.Resume(trainer_service_pb2.ResumeRequest(), timeout=PATIENCE_S)).step == 3
        assert not (await stub.Status(status, timeout=PATIENCE_S)).HasField("pause_reason")


async def test_a_checkpoint_and_a_learning_rate_are_answered_when_the_loop_has_made_them() -> None:
    controls = Controls()
    controls.at(4)
    async with _serving(_servicer(Progress(), controls)) as stub, asyncio.timeout(PATIENCE_S):
        saved = asyncio.ensure_future(
            stub.Checkpoint(trainer_service_pb2.CheckpointRequest(), timeout=PATIENCE_S)
        )
        request = trainer_service_pb2.SetLearningRateRequest(learning_rate=0.5)
        changed = asyncio.ensure_future(stub.SetLearningRate(request, timeout=PATIENCE_S))
        both = Orders(checkpoint=True, learning_rate=0.5)
        await eventually(lambda: controls.take(waiting=lambda _: None) == both, what="both are asked for")
        assert not saved.done()
        controls.checkpointed(4)
        controls.learning_rate_set(0.5, RateChange(first_step=5, previous=0.25))
        assert (await saved).step == 4
        answer = await changed
    assert (answer.first_step, answer.previous_learning_rate) == (5, 0.25)


async def test_controls_are_refused_before_training_and_beyond_their_bounds() -> None:
    controls = Controls()
    async with _serving(_servicer(Progress(), controls)) as stub:
        early = await _refused(stub.Checkpoint(trainer_service_pb2.CheckpointRequest(), timeout=PATIENCE_S))
        rates = [
            await _refused(
                stub.SetLearningRate(
                    trainer_service_pb2.SetLearningRateRequest(learning_rate=rate), timeout=PATIENCE_S
                )
            )
            for rate in (-1e-9, 1.5, math.nan, math.inf)
        ]
        wordy = await _refused(
            stub.Pause(trainer_service_pb2.PauseRequest(reason="x" * 201), timeout=PATIENCE_S)
        )
    assert (early.reason, "ask again" in early.message) == ("FAILED_PRECONDITION", True)
    assert [error.reason for error in [*rates, wordy]] == ["INVALID_ARGUMENT"] * 5
    assert "in [0, 1]" in rates[0].message
    assert "201 characters, at most 200" in wordy.message


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
