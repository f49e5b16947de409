"""TrajectoryService: the push stream and its unary form."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from astraflow.dataflow.v1 import trajectory_service_pb2 as pb
from astraflow.dataflow.v1 import trajectory_service_pb2_grpc
from astraflow.errors import AstraflowError, InvalidArgumentError
from astraflow.rollout.v1.trajectory_pb2 import Episode
from astraflow_dataflow.episodes.ingest import Ingest
from astraflow_dataflow.episodes.push_window import PushWindow
from astraflow_dataflow.runs.registry import RunRegistry
from astraflow_dataflow.store.durability import Durability
from astraflow_dataflow.store.tasks import Pushed
from astraflow_kit.serve import Context


@dataclass(frozen=True)
class TrajectoryServicer(trajectory_service_pb2_grpc.TrajectoryServiceServicer):
    """Serves TrajectoryService."""

    registry: RunRegistry
    ingest: Ingest
    durability: Durability

    async def Push(
        self, requests: AsyncIterator[pb.PushRequest], context: Context
    ) -> AsyncIterator[pb.PushResponse]:
        window: PushWindow[pb.PushResponse] = PushWindow()
        reader = asyncio.create_task(self._read(requests, window), name="pushes")
        try:
            async for response in window.answers():
                yield response
            await reader
        finally:
            reader.cancel()
            window.close()

    async def _read(
        self, requests: AsyncIterator[pb.PushRequest], window: PushWindow[pb.PushResponse]
    ) -> None:
        expected = 1
        try:
            async for request in requests:
                if request.sequence != expected:
                    raise InvalidArgumentError(
                        f"sequence {request.sequence} follows {expected - 1}; number pushes 1, 2, 3 … within a stream"
                    )
                expected += 1
                episodes = _episodes(request)
                await window.add(len(episodes), request.ByteSize(), self._pushed(request, episodes))
        finally:
            await window.end()

    async def _pushed(self, request: pb.PushRequest, episodes: Sequence[Episode]) -> pb.PushResponse:
        run = await self.registry.get(episodes[0].run_id)
        pushed = await self.ingest.push(run, episodes)
        response = pb.PushResponse(sequence=request.sequence, watermark=self.durability.watermark(run.run_id))
        if request.episodes:
            response.results.extend(map(_result, pushed))
        else:
            response.result.CopyFrom(_alone(pushed))
        return response

    async def PushEpisode(self, request: pb.PushEpisodeRequest, context: Context) -> pb.PushEpisodeResponse:
        run = await self.registry.get(request.episode.run_id)
        result = _alone(await self.ingest.push(run, [request.episode]))
        return pb.PushEpisodeResponse(result=result, watermark=self.durability.watermark(run.run_id))


def _episodes(request: pb.PushRequest) -> Sequence[Episode]:
    """The episodes of a push. Raises InvalidArgumentError when it has none, two kinds, or those of several runs."""
    if request.HasField("episode") == bool(request.episodes):
        raise InvalidArgumentError(
            f"push {request.sequence} has {'both' if request.episodes else 'neither'} `episode` "
            f"{'and' if request.episodes else 'nor'} `episodes`; give one of them"
        )
    episodes = request.episodes or [request.episode]
    runs = sorted({episode.run_id for episode in episodes})
    if len(runs) > 1:
        raise InvalidArgumentError(
            f"push {request.sequence} has episodes of the runs {runs[0]!r} and {runs[1]!r}; push those of one run "
            "together"
        )
    return episodes


def _alone(pushed: Sequence[Pushed]) -> pb.PushResult:
    (result,) = pushed
    if isinstance(result, AstraflowError):
        raise result
    return result


def _result(pushed: Pushed) -> pb.PushResult:
    if isinstance(pushed, AstraflowError):
        return pb.PushResult(outcome=pb.OUTCOME_RETRY, reason=pushed.reason, detail=pushed.message)
    return pushed
