"""TrajectoryService: the push stream and its unary form."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from astraflow.dataflow.v1 import trajectory_service_pb2 as pb
from astraflow.dataflow.v1 import trajectory_service_pb2_grpc
from astraflow.dataflow.v1.durability_pb2 import Watermark
from astraflow.errors import AstraflowError, InvalidArgumentError
from astraflow.rollout.v1.trajectory_pb2 import Episode
from astraflow_dataflow.episodes.holding import HeldPushes
from astraflow_dataflow.episodes.push_window import PushWindow
from astraflow_dataflow.runs.registry import RunRegistry
from astraflow_dataflow.store.durability import Durability
from astraflow_dataflow.store.episodes.commits import Pushed
from astraflow_kit.identity.speakers import speaking_node
from astraflow_kit.serve import Context


class _Push(NamedTuple):
    """A request of a push stream."""

    sequence: int
    episodes: Sequence[Episode]


class _Answer(NamedTuple):
    """What became of a request."""

    sequence: int
    results: Sequence[pb.PushResult]
    watermark: Watermark | None


@dataclass(frozen=True)
class TrajectoryServicer(trajectory_service_pb2_grpc.TrajectoryServiceServicer):
    """Serves TrajectoryService."""

    registry: RunRegistry
    pushes: HeldPushes
    durability: Durability

    async def Push(
        self, requests: AsyncIterator[pb.PushRequest], context: Context
    ) -> AsyncIterator[pb.PushResponse]:
        window: PushWindow[_Push, _Answer] = PushWindow(self._pushed)
        reader = asyncio.create_task(_read(requests, window), name="pushes")
        try:
            async for answers in window.answers():
                yield _response(answers)  # one to each request would cost 20 to 40 µs of CPU
            await reader
        finally:
            reader.cancel()
            window.close()

    async def _pushed(self, pushes: Sequence[_Push]) -> list[_Answer | Exception]:
        """What is answered to requests that came together and are taken in together."""
        node = speaking_node()
        try:
            run = await self.registry.get(node.run_id)
            episodes = [one for push in pushes for one in push.episodes]
            pushed = iter(await self.pushes.push(run, episodes, node=node))
        except AstraflowError as error:
            return [error for _ in pushes]
        watermark = self.durability.watermark(node.run_id)
        return [
            _Answer(push.sequence, [_result(next(pushed)) for _ in push.episodes], watermark)
            for push in pushes
        ]

    async def PushEpisode(self, request: pb.PushEpisodeRequest, context: Context) -> pb.PushEpisodeResponse:
        node = speaking_node()
        run = await self.registry.get(node.run_id)
        (result,) = await self.pushes.push(run, [request.episode], node=node)
        if isinstance(result, AstraflowError):
            raise result
        return pb.PushEpisodeResponse(result=result, watermark=self.durability.watermark(run.run_id))


async def _read(requests: AsyncIterator[pb.PushRequest], window: PushWindow[_Push, _Answer]) -> None:
    expected = 1
    try:
        async for request in requests:
            if request.sequence != expected:
                raise InvalidArgumentError(
                    f"sequence {request.sequence} follows {expected - 1}; number pushes 1, 2, 3 … within a stream"
                )
            expected += 1
            push = _Push(request.sequence, request.episodes)
            await window.add(len(push.episodes), request.ByteSize(), push)
    finally:
        await window.end()


def _response(answers: Sequence[_Answer]) -> pb.PushResponse:
    results = [result for answer in answers for result in answer.results]
    return pb.PushResponse(sequence=answers[-1].sequence, results=results, watermark=answers[-1].watermark)


def _result(pushed: Pushed) -> pb.PushResult:
    if isinstance(pushed, AstraflowError):
        return pb.PushResult(outcome=pb.OUTCOME_RETRY, reason=pushed.reason, detail=pushed.message)
    return pushed
