"""TrainerService: translates the contract to `Progress` and `Controls`; nothing is decided here."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeAlias

from astraflow.trainer.v1 import trainer_service_pb2, trainer_service_pb2_grpc
from astraflow_kit.server_info import server_info
from astraflow_trainer.controls import Controls
from astraflow_trainer.progress import Phase, Progress, StepRecord
from astraflow_trainer.trackers.feed import TrackerFeed

if TYPE_CHECKING:
    import grpc.aio

_WATCH_POLL_S = 5.0

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class TrainerServicer(trainer_service_pb2_grpc.TrainerServiceServicer):
    """Serves one trainer."""

    def __init__(
        self,
        progress: Progress,
        controls: Controls,
        *,
        run_id: str,
        policy_id: str,
        trackers: Sequence[TrackerFeed] = (),
    ) -> None:
        self._trackers = trackers
        self._progress = progress
        self._controls = controls
        self._run_id = run_id
        self._policy_id = policy_id

    async def GetServerInfo(
        self, request: trainer_service_pb2.GetServerInfoRequest, context: Context
    ) -> trainer_service_pb2.GetServerInfoResponse:
        """Say who this trainer is."""
        return trainer_service_pb2.GetServerInfoResponse(server=server_info())

    async def Status(
        self, request: trainer_service_pb2.StatusRequest, context: Context
    ) -> trainer_service_pb2.StatusResponse:
        """Return the current snapshot."""
        state = self._progress.state
        return trainer_service_pb2.StatusResponse(
            run_id=self._run_id,
            policy_id=self._policy_id,
            phase=trainer_service_pb2.Phase.Value(f"PHASE_{state.phase.name}"),
            waiting_for=state.waiting_for,
            progress=state.fraction or 0.0,
            step=state.step,
            version=state.version,
            trainer_epoch=state.trainer_epoch,
            wait_fraction=self._progress.wait_fraction(),
            pause_reason=self._controls.pause_reason,
            durable_step=state.durable_step,
            learning_rate=state.learning_rate,
            tracker_faults=[
                trainer_service_pb2.TrackerFault(**asdict(feed.fault))
                for feed in self._trackers
                if feed.fault
            ],
        )

    async def Pause(
        self, request: trainer_service_pb2.PauseRequest, context: Context
    ) -> trainer_service_pb2.PauseResponse:
        """Ask the loop to pause after the step in hand."""
        return trainer_service_pb2.PauseResponse(step=self._controls.pause(request.reason))

    async def Resume(
        self, request: trainer_service_pb2.ResumeRequest, context: Context
    ) -> trainer_service_pb2.ResumeResponse:
        """End a pause."""
        return trainer_service_pb2.ResumeResponse(step=self._controls.resume())

    async def Checkpoint(
        self, request: trainer_service_pb2.CheckpointRequest, context: Context
    ) -> trainer_service_pb2.CheckpointResponse:
        """Ask for a checkpoint and wait until it is durable."""
        step = await asyncio.wrap_future(self._controls.checkpoint())
        return trainer_service_pb2.CheckpointResponse(step=step)

    async def SetLearningRate(
        self, request: trainer_service_pb2.SetLearningRateRequest, context: Context
    ) -> trainer_service_pb2.SetLearningRateResponse:
        """Ask for another learning rate and wait until it is in force and durable."""
        change = await asyncio.wrap_future(self._controls.set_learning_rate(request.learning_rate))
        return trainer_service_pb2.SetLearningRateResponse(
            first_step=change.first_step, previous_learning_rate=change.previous
        )

    async def StopAfterStep(
        self, request: trainer_service_pb2.StopAfterStepRequest, context: Context
    ) -> trainer_service_pb2.StopAfterStepResponse:
        """Ask the loop to end after the step in progress."""
        return trainer_service_pb2.StopAfterStepResponse(step=self._controls.stop_after_step())

    async def WatchMetrics(
        self, request: trainer_service_pb2.WatchMetricsRequest, context: Context
    ) -> AsyncIterator[trainer_service_pb2.WatchMetricsResponse]:
        """Stream finished steps until training has ended."""
        after = request.after_step
        while True:
            # Asked before the records: a slow reader would otherwise miss those of the time it took to read.
            finished = self._progress.state.phase is Phase.FINISHED
            records = self._progress.records_after(after)
            for record in records:
                after = record.step
                yield _as_message(record)
            if finished:
                return
            if not records:
                await self._progress.changed(timeout_s=_WATCH_POLL_S)


def _as_message(record: StepRecord) -> trainer_service_pb2.WatchMetricsResponse:
    message = trainer_service_pb2.WatchMetricsResponse(
        step=record.step, version=record.version, metrics=dict(record.metrics)
    )
    message.finish_time.FromNanoseconds(int(record.finished_at_s * 1e9))
    message.wait_duration.FromNanoseconds(int(record.wait_s * 1e9))
    message.train_duration.FromNanoseconds(int(record.train_s * 1e9))
    return message
