"""TrajectoryService: the push stream and its unary form."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
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
from astraflow_dataflow.store.episodes.commits import Pushed
from astraflow_kit.serve import Context


class _Push(NamedTuple):
    """A request of a push stream."""

    sequence: int
    run_id: str
    episodes: Sequence[Episode]


class _Answer(NamedTuple):
    """What became of a request."""

    sequence: int
    run_id: str
    results: Sequence[pb.PushResult]
    watermark: Watermark | None


@dataclass(frozen=True)
class TrajectoryServicer(trajectory_service_pb2_grpc.TrajectoryServiceServicer):
    """Serves TrajectoryService."""

    registry: RunRegistry
    ingest: Ingest
    durability: Durability

    async def Push(
        self, requests: AsyncIterator[pb.PushRequest], context: Context
    ) -> AsyncIterator[pb.PushResponse]:
        window: PushWindow[_Push, _Answer] = PushWindow(self._pushed)
        reader = asyncio.create_task(_read(requests, window), name="pushes")
        try:
            async for answers in window.answers():
                # A response to each request would cost 20 to 40 µs of CPU. A watermark is that of a run.
                for _, own in groupby(answers, key=attrgetter("run_id")):
                    yield _response(list(own))
            await reader
        finally:
            reader.cancel()
            window.close()

    async def _pushed(self, pushes: Sequence[_Push]) -> list[_Answer | Exception]:
        """What is answered to requests that came together; those of one run are taken in together."""
        answers: dict[int, _Answer | Exception] = {}
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
                results = [_result(next(pushed)) for _ in push.episodes]
                answers[push.sequence] = _Answer(push.sequence, run_id, results, watermark)
        return [answers[push.sequence] for push in pushes]

    async def PushEpisode(self, request: pb.PushEpisodeRequest, context: Context) -> pb.PushEpisodeResponse:
        run = await self.registry.get(request.episode.run_id)
        (result,) = await self.ingest.push(run, [request.episode])
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
            push = _Push(request.sequence, _run_of(request), request.episodes)
            await window.add(len(push.episodes), request.ByteSize(), push)
    finally:
        await window.end()


def _run_of(request: pb.PushRequest) -> str:
    """The run of the episodes. Raises InvalidArgumentError when they are of several."""
    runs = sorted({episode.run_id for episode in request.episodes})
    if len(runs) > 1:
        raise InvalidArgumentError(
            f"push {request.sequence} has episodes of the runs {runs[0]!r} and {runs[1]!r}; push those of one run "
            "together"
        )
    return runs[0]


def _response(answers: Sequence[_Answer]) -> pb.PushResponse:
    results = [result for answer in answers for result in answer.results]
    return pb.PushResponse(sequence=answers[-1].sequence, results=results, watermark=answers[-1].watermark)


def _result(pushed: Pushed) -> pb.PushResult:
    if isinstance(pushed, AstraflowError):
        return pb.PushResult(outcome=pb.OUTCOME_RETRY, reason=pushed.reason, detail=pushed.message)
    return pushed
