"""TrainerService over a real server: snapshots, the stop request, and metrics that miss no step."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, cast

import grpc
import pytest

from astraflow._status import from_rpc_error
from astraflow.errors import AstraflowError
from astraflow.trainer.v1 import trainer_service_pb2 as pb
from astraflow.trainer.v1 import trainer_service_pb2_grpc
from astraflow_kit import metrics, serve
from astraflow_kit.settings import DaemonSettings
from astraflow_trainer import controls, progress
from astraflow_trainer.servicer import TrainerServicer
from astraflow_trainer.trackers.feed import TrackerFeed
from support.scripted_dataflow import eventually

METRICS = {"reward_mean": 0.5}
RECORD = progress.StepRecord(step=1, version=1, finished_at_s=10.5, wait_s=0.25, train_s=2.5, metrics=METRICS)
PATIENCE_S = 10.0
Stub: TypeAlias = "trainer_service_pb2_grpc.TrainerServiceAsyncStub"


async def _refused(call: Awaitable[object]) -> AstraflowError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return from_rpc_error(refused.value)


class Trainer:
    """What a trainer knows of itself, and the service that tells it."""

    def __init__(self) -> None:
        self.progress, self.controls = progress.Progress(), controls.Controls()
        self.trackers: list[TrackerFeed] = []
        self.servicer = TrainerServicer(
            self.progress, self.controls, run_id="run-1", policy_id="solver", trackers=self.trackers
        )


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


@pytest.fixture
async def stub(trainer: Trainer) -> AsyncIterator[Stub]:
    add = trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server
    served = serve.GrpcServer([(add, trainer.servicer)], settings=DaemonSettings(), metrics=metrics.Metrics())
    await served.start()
    async with grpc.aio.insecure_channel(served.address) as channel:
        yield trainer_service_pb2_grpc.TrainerServiceStub(channel)
    await served.stop(deadline_s=1.0)


async def _status(stub: Stub) -> pb.StatusResponse:
    return await stub.Status(pb.StatusRequest(), timeout=PATIENCE_S)


async def test_status_is_the_snapshot_of_the_trainer(trainer: Trainer, stub: Stub) -> None:
    trainer.progress.claimed(epoch=3, step=7, version=6)
    trainer.progress.resumed(durable_step=5, learning_rate=0.25)
    trainer.progress.waiting("ready_groups")
    status = await _status(stub)
    assert (status.run_id, status.policy_id) == ("run-1", "solver")
    assert status.phase == pb.PHASE_WAITING
    assert (status.waiting_for, status.progress) == ("ready_groups", 1.0)
    assert (status.step, status.version, status.trainer_epoch) == (7, 6, 3)
    assert status.wait_fraction == pytest.approx(1.0)
    assert (status.durable_step, status.learning_rate) == (5, 0.25)


async def test_status_names_the_trackers_that_lack_steps(
    trainer: Trainer, stub: Stub, tmp_path: Path
) -> None:
    def unreachable(run_id: str, next_step: int) -> NoReturn:
        raise ConnectionError("no route")

    feed = TrackerFeed("wandb", unreachable, folder=tmp_path, metrics=metrics.Metrics())
    trainer.trackers.append(feed)
    assert not (await _status(stub)).tracker_faults
    feed.put(RECORD)
    await asyncio.to_thread(feed.close)
    (fault,) = (await _status(stub)).tracker_faults
    assert (fault.tracker, fault.steps_missed, fault.error) == ("wandb", 1, "ConnectionError: no route")


async def test_status_has_no_version_before_the_first_is_published(stub: Stub) -> None:
    assert not (await _status(stub)).HasField("version")


@pytest.mark.parametrize("phase", list(progress.Phase))
async def test_every_phase_has_its_name_in_the_contract(phase: progress.Phase, trainer: Trainer) -> None:
    trainer.progress.ended(phase)
    status = await trainer.servicer.Status(pb.StatusRequest(), cast("Any", None))
    assert pb.Phase.Name(status.phase) == f"PHASE_{phase.name}"


async def test_a_stop_request_returns_the_last_step_that_will_be_taken(trainer: Trainer, stub: Stub) -> None:
    trainer.controls.at(12)
    assert (await stub.StopAfterStep(pb.StopAfterStepRequest(), timeout=PATIENCE_S)).step == 12
    late = await _refused(stub.Pause(pb.PauseRequest(), timeout=PATIENCE_S))
    assert late.reason == "FAILED_PRECONDITION"


async def test_a_pause_is_shown_with_its_reason_until_it_ends(trainer: Trainer, stub: Stub) -> None:
    trainer.controls.at(3)
    assert not (await _status(stub)).HasField("pause_reason")
    for reason in ("disk", "disk is full"):
        assert (await stub.Pause(pb.PauseRequest(reason=reason), timeout=PATIENCE_S)).step == 3
    assert (await _status(stub)).pause_reason == "disk is full"
    for _ in range(2):
        assert (await stub.Resume(pb.ResumeRequest(), timeout=PATIENCE_S)).step == 3
    assert not (await _status(stub)).HasField("pause_reason")


async def test_a_checkpoint_and_a_learning_rate_are_answered_when_made(trainer: Trainer, stub: Stub) -> None:
    trainer.controls.at(4)
    async with asyncio.timeout(PATIENCE_S):
        saved = asyncio.ensure_future(stub.Checkpoint(pb.CheckpointRequest()))
        changed = asyncio.ensure_future(stub.SetLearningRate(pb.SetLearningRateRequest(learning_rate=0.5)))
        both = controls.Orders(checkpoint=True, learning_rate=0.5)
        take = partial(trainer.controls.take, waiting=lambda _: None)
        await eventually(lambda: take() == both, what="both are asked for")
        assert not saved.done()
        trainer.controls.checkpointed(4)
        trainer.controls.learning_rate_set(0.5, controls.RateChange(first_step=5, previous=0.25))
        assert (await saved).step == 4
        answer = await changed
    assert (answer.first_step, answer.previous_learning_rate) == (5, 0.25)


async def test_a_checkpoint_is_refused_before_training(stub: Stub) -> None:
    early = await _refused(stub.Checkpoint(pb.CheckpointRequest(), timeout=PATIENCE_S))
    assert (early.reason, "ask again" in early.message) == ("FAILED_PRECONDITION", True)


@pytest.mark.parametrize("rate", [-1e-9, 1.5, math.nan, math.inf])
async def test_a_learning_rate_beyond_its_bounds_is_refused(stub: Stub, rate: float) -> None:
    request = pb.SetLearningRateRequest(learning_rate=rate)
    refused = await _refused(stub.SetLearningRate(request, timeout=PATIENCE_S))
    assert refused.reason == "INVALID_ARGUMENT"
    assert refused.message.startswith(f"SetLearningRateRequest.learning_rate is {rate}, which must be ")


async def test_metrics_come_from_the_asked_step_and_end_with_training(trainer: Trainer, stub: Stub) -> None:
    for step in (1, 2, 3):
        trainer.progress.stepped(replace(RECORD, step=step, version=None if step == 2 else step))
    received: list[pb.WatchMetricsResponse] = []
    async with asyncio.timeout(PATIENCE_S):
        async for message in stub.WatchMetrics(pb.WatchMetricsRequest(after_step=1)):
            received.append(message)
            if message.step == 3:
                trainer.progress.stepped(replace(RECORD, step=4, version=4))
                trainer.progress.ended(progress.Phase.FINISHED)
    assert [message.step for message in received] == [2, 3, 4]
    assert [message.HasField("version") for message in received] == [False, True, True]
    last = received[-1]
    assert last.finish_time.ToNanoseconds() == 10_500_000_000
    assert (last.wait_duration.ToMilliseconds(), last.train_duration.ToMilliseconds()) == (250, 2500)
    assert dict(last.metrics) == {"reward_mean": 0.5}


async def test_a_slow_reader_gets_the_steps_that_finished_while_it_was_reading(trainer: Trainer) -> None:
    """Training may end between two messages; what finished in between must still be sent."""
    trainer.progress.stepped(RECORD)
    stream = trainer.servicer.WatchMetrics(pb.WatchMetricsRequest(), cast("Any", None))
    steps = [(await anext(stream)).step]
    trainer.progress.stepped(replace(RECORD, step=2))
    trainer.progress.ended(progress.Phase.FINISHED)
    async with asyncio.timeout(PATIENCE_S):
        steps += [message.step async for message in stream]
    assert steps == [1, 2]
