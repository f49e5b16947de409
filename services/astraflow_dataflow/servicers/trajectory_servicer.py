"""TrajectoryService: the push stream and its unary form."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from astraflow.dataflow.v1 import trajectory_service_pb2 as pb
from astraflow.dataflow.v1 import trajectory_service_pb2_grpc
from astraflow.errors import InvalidArgumentError
from astraflow_dataflow.episodes.ingest import Ingest
from astraflow_dataflow.episodes.push_window import PushWindow
from astraflow_dataflow.runs.registry import RunRegistry
from astraflow_dataflow.store.durability import Durability
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
        window: PushWindow[tuple[int, str]] = PushWindow()
        reader = asyncio.create_task(self._read(requests, window), name="pushes")
        try:
            async for (sequence, run_id), result in window.answers():
                watermark = self.durability.watermark(run_id)
                yield pb.PushResponse(sequence=sequence, result=result, watermark=watermark)
            await reader
        finally:
            reader.cancel()
            window.close()

    async def _read(
        self, requests: AsyncIterator[pb.PushRequest], window: PushWindow[tuple[int, str]]
    ) -> None:
        expected = 1
        try:
            async for request in requests:
                if request.sequence != expected:
                    raise InvalidArgumentError(
                        f"sequence {request.sequence} follows {expected - 1}; number pushes 1, 2, 3 … within a stream"
                    )
                expected += 1
                run = await self.registry.get(request.episode.run_id)
                push = self.ingest.push(run, request.episode)
                await window.add((request.sequence, run.run_id), request.ByteSize(), push)
        finally:
            await window.end()

    async def PushEpisode(self, request: pb.PushEpisodeRequest, context: Context) -> pb.PushEpisodeResponse:
        run = await self.registry.get(request.episode.run_id)
        result = await self.ingest.push(run, request.episode)
        return pb.PushEpisodeResponse(result=result, watermark=self.durability.watermark(run.run_id))
