"""TrajectoryService: the push stream and its unary form."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from astraflow.dataflow.v1 import durability_pb2, trajectory_service_pb2_grpc
from astraflow.dataflow.v1 import trajectory_service_pb2 as pb
from astraflow.errors import InvalidArgumentError
from astraflow_dataflow.episodes.ingest import PushOutcome
from astraflow_dataflow.episodes.ingests import Ingests
from astraflow_dataflow.episodes.push_window import PushWindow
from astraflow_kit.serve import Context


@dataclass(frozen=True)
class TrajectoryServicer(trajectory_service_pb2_grpc.TrajectoryServiceServicer):
    """Serves TrajectoryService."""

    ingests: Ingests

    async def Push(
        self, requests: AsyncIterator[pb.PushRequest], context: Context
    ) -> AsyncIterator[pb.PushResponse]:
        window = PushWindow()
        reader = asyncio.create_task(self._read(requests, window), name="pushes")
        try:
            async for sequence, outcome in window.answers():
                durability = self.ingests.durability
                yield pb.PushResponse(
                    sequence=sequence,
                    result=result_message(outcome, durability.reached),
                    watermark=durability.watermark(outcome.run_id),
                )
            await reader
        finally:
            reader.cancel()
            window.close()

    async def _read(self, requests: AsyncIterator[pb.PushRequest], window: PushWindow) -> None:
        expected = 1
        try:
            async for request in requests:
                if request.sequence != expected:
                    raise InvalidArgumentError(
                        f"sequence {request.sequence} follows {expected - 1}; number pushes 1, 2, 3 … within a stream"
                    )
                expected += 1
                ingest = await self.ingests.get(request.episode.run_id)
                await window.add(request.sequence, request.ByteSize(), ingest.push(request.episode))
        finally:
            await window.end()

    async def PushEpisode(self, request: pb.PushEpisodeRequest, context: Context) -> pb.PushEpisodeResponse:
        ingest = await self.ingests.get(request.episode.run_id)
        outcome, durability = await ingest.push(request.episode), self.ingests.durability
        return pb.PushEpisodeResponse(
            result=result_message(outcome, durability.reached), watermark=durability.watermark(outcome.run_id)
        )


def result_message(outcome: PushOutcome, durability: durability_pb2.Durability.ValueType) -> pb.PushResult:
    """Return the contract's form of an outcome."""
    return pb.PushResult(
        outcome=pb.Outcome.Value(f"OUTCOME_{outcome.outcome.value}"),
        reason=outcome.reason,
        detail=outcome.detail,
        durability=durability,
        position=outcome.position,
    )
