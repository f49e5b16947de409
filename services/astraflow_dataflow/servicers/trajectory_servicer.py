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
from astraflow_dataflow.episodes.ingest import Ingest
from astraflow_dataflow.episodes.push_window import PushWindow
from astraflow_dataflow.runs.registry import RunRegistry
from astraflow_dataflow.store.durability import Durability
from astraflow_dataflow.store.tasks import Pushed
from astraflow_kit.serve import Context


class _Push(NamedTuple):
    """A request of a push stream."""

    sequence: int
    is_pack: bool
    run_id: str
    episodes: Sequence[Episode]


@dataclass(frozen=True)
class TrajectoryServicer(trajectory_service_pb2_grpc.TrajectoryServiceServicer):
    """Serves TrajectoryService."""

    registry: RunRegistry
    ingest: Ingest
    durability: Durability

    async def Push(
        self, requests: AsyncIterator[pb.PushRequest], context: Context
    ) -> AsyncIterator[pb.PushResponse]:
        window: PushWindow[_Push, pb.PushResponse] = PushWindow(self._pushed)
        reader = asyncio.create_task(_read(requests, window), name="pushes")
        try:
            async for response in window.answers():
                yield response
            await reader
        finally:
            reader.cancel()
            window.close()

    async def _pushed(self, pushes: Sequence[_Push]) -> list[pb.PushResponse | Exception]:
        """What is answered to requests that came together; those of one run are taken in together."""
        answers: dict[int, pb.PushResponse | Exception] = {}
        for run_id in dict.fromkeys(push.run_id for push in pushes):
            own = [push for push in pushes if push.run_id == run_id]
            try:
                run = await self.registry.get(run_id)
                pushed = iter(await self.ingest.push(run, [one for push in own for one in push.episodes]))
            except AstraflowError as error:
                answers.update((push.sequence, error) for push in own)
                continue
            watermark = self.durability.watermark(run_id)
            for push in own:
                results = [next(pushed) for _ in push.episodes]
                answers[push.sequence] = _response(push, results, watermark)
        return [answers[push.sequence] for push in pushes]

    async def PushEpisode(self, request: pb.PushEpisodeRequest, context: Context) -> pb.PushEpisodeResponse:
        run = await self.registry.get(request.episode.run_id)
        result = _alone(await self.ingest.push(run, [request.episode]))
        return pb.PushEpisodeResponse(result=result, watermark=self.durability.watermark(run.run_id))


async def _read(requests: AsyncIterator[pb.PushRequest], window: PushWindow[_Push, pb.PushResponse]) -> None:
    expected = 1
    try:
        async for request in requests:
            if request.sequence != expected:
                raise InvalidArgumentError(
                    f"sequence {request.sequence} follows {expected - 1}; number pushes 1, 2, 3 … within a stream"
                )
            expected += 1
            episodes = _episodes(request)
            push = _Push(request.sequence, bool(request.episodes), episodes[0].run_id, episodes)
            await window.add(len(episodes), request.ByteSize(), push)
    finally:
        await window.end()


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


def _response(
    push: _Push, results: Sequence[Pushed], watermark: Watermark | None
) -> pb.PushResponse | AstraflowError:
    """The answer to a request; one that has an episode of its own is answered with its error."""
    if push.is_pack:
        return pb.PushResponse(sequence=push.sequence, watermark=watermark, results=map(_result, results))
    (result,) = results
    if isinstance(result, AstraflowError):
        return result
    return pb.PushResponse(sequence=push.sequence, watermark=watermark, result=result)


def _result(pushed: Pushed) -> pb.PushResult:
    if isinstance(pushed, AstraflowError):
        return pb.PushResult(outcome=pb.OUTCOME_RETRY, reason=pushed.reason, detail=pushed.message)
    return pushed
