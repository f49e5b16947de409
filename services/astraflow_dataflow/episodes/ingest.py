"""Ingest: pushed episodes are validated, committed in micro-batches, and their groups settled.

An acknowledgement is given only after Redis answered the commit. Whatever arrived while one pipeline was in
flight goes into the next, so the cost per episode falls under load and the latency does not rise without. One
per process, made by `server`; called by the trajectory service.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from astraflow.dataflow.v1.trajectory_service_pb2 import Outcome, PushResult
from astraflow.errors import (
    AstraflowError,
    UnavailableError,
    UnknownVersionError,
)
from astraflow.rollout.v1 import trajectory_pb2
from astraflow.trajectories import BadTrajectory
from astraflow_dataflow.episodes.settling import Settling
from astraflow_dataflow.records import Committed, CompleteTask
from astraflow_dataflow.rules import evaluation
from astraflow_dataflow.rules.snapshots import results
from astraflow_dataflow.rules.trajectories import Expectation, check_episode, unknown_version
from astraflow_dataflow.runs import background
from astraflow_dataflow.runs.registry import RunContext, RunRegistry
from astraflow_dataflow.store.durability import Durability
from astraflow_dataflow.store.store import Store
from astraflow_kit import failpoints
from astraflow_kit.log import bind, get_logger
from astraflow_kit.metrics import Metrics
from astraflow_kit.unit_of_work import task_correlation

log = get_logger(__name__)

EPISODES_PER_PIPELINE = 64
_VERSION_GRACE_S = 1.0
_ACCEPTED = (Outcome.OUTCOME_ACCEPTED, Outcome.OUTCOME_ACCEPTED_LATE)
_INTERRUPTED = "the commit was interrupted; push again"


@dataclass(frozen=True)
class _Waiting:
    episode: trajectory_pb2.Episode
    result: asyncio.Future[PushResult]


@dataclass
class Ingest:
    """The push path of this process: per run one queue and one loop that commits what is in it."""

    store: Store
    registry: RunRegistry
    settling: Settling
    metrics: Metrics
    durability: Durability
    _queues: dict[str, tuple[RunContext, asyncio.Queue[_Waiting]]] = field(default_factory=dict)

    async def push(self, context: RunContext, episode: trajectory_pb2.Episode) -> PushResult:
        """Take one episode in and return what became of it, after the commit has reached the durability asked for.

        Raises UnknownVersionError for a version not announced yet,
        PayloadMissingError when the push must be repeated, UnavailableError when Redis is away.
        """
        started_s = asyncio.get_running_loop().time()
        # A stream carries many tasks, so its metadata cannot say which one this line is about.
        bind(correlation_id=task_correlation(episode.task_id), task_id=episode.task_id)
        await self._wait_for_version(context, episode)
        demand = evaluation.demand_of(episode.task_id, context.trained_policies)
        expectation = Expectation(
            newest_versions=context.newest_versions,
            roles=context.trained_roles,
            demand=demand,
            blob_prefix=context.blob_prefix,
        )
        try:
            check_episode(episode, expectation)
        except BadTrajectory as problem:
            result = await self.store.episodes.quarantine(
                context.run_id, episode, reason=problem.slug, detail=problem.detail
            )
            log.warning("episode.quarantined", reason=problem.slug, detail=problem.detail)
        else:
            result = await self._enqueue(context, episode)
        self.durability.note(context.run_id, result.position)
        await self.durability.barrier()
        result.durability = self.durability.reached
        outcome = Outcome.Name(result.outcome).removeprefix("OUTCOME_").lower()
        self.metrics.increment("astraflow_dataflow_pushes_total", outcome=outcome)
        self.metrics.observe("astraflow_dataflow_push_seconds", asyncio.get_running_loop().time() - started_s)
        return result

    async def _wait_for_version(self, context: RunContext, episode: trajectory_pb2.Episode) -> None:
        """Give an announcement that is on its way a moment to arrive."""
        if unknown_version(episode, newest_versions=context.newest_versions) is None:
            return
        topics = [f"version {policy_id}" for policy_id in context.policy_ids]
        with context.wakeups.subscribe(*topics) as news:
            await self.registry.refresh_versions(context)
            if unknown_version(episode, newest_versions=context.newest_versions) is None:
                return
            await news.wait(_VERSION_GRACE_S)
            await self.registry.refresh_versions(context)
        sentence = unknown_version(episode, newest_versions=context.newest_versions)
        if sentence is not None:
            raise UnknownVersionError(sentence, retry_after_s=1.0)

    async def _enqueue(self, context: RunContext, episode: trajectory_pb2.Episode) -> PushResult:
        committed: asyncio.Future[PushResult] = asyncio.get_running_loop().create_future()
        await self._queue_of(context).put(_Waiting(episode, committed))
        result = await committed
        failpoints.hit("dataflow.committed")
        return result

    def _queue_of(self, context: RunContext) -> asyncio.Queue[_Waiting]:
        """The run's queue; its loop is started on first use and ends with the context."""
        owner, queue = self._queues.get(context.run_id, (None, None))
        if queue is None or owner is not context:
            queue = asyncio.Queue(maxsize=4 * EPISODES_PER_PIPELINE)
            self._queues[context.run_id] = (context, queue)
            work = partial(self._run, context, queue)
            context.tasks.append(background.start(work, name="ingest", run_id=context.run_id))
        return queue

    async def _run(self, context: RunContext, queue: asyncio.Queue[_Waiting]) -> None:
        """Commit what arrives, until cancelled. Groups are settled beside the next commits."""
        try:
            async with asyncio.TaskGroup() as settlers:
                while True:
                    batch = [await queue.get()]
                    while len(batch) < EPISODES_PER_PIPELINE and not queue.empty():
                        batch.append(queue.get_nowait())
                    for task in await self._commit(context, batch):
                        settlers.create_task(self._settle(context, task), name=f"settle {task.task_id}")
        finally:
            while not queue.empty():
                _answer(queue.get_nowait().result, UnavailableError(_INTERRUPTED, retry_after_s=0.2))

    async def _commit(self, context: RunContext, batch: Sequence[_Waiting]) -> list[CompleteTask]:
        """Commit a batch, answer its pushers, and return the tasks it completed."""
        failpoints.hit("dataflow.storing")
        replies: Sequence[Committed | AstraflowError]
        try:
            replies = await self.store.episodes.commit(
                context.run_id,
                [waiting.episode for waiting in batch],
                horizon_s=context.recipe.dataflow.group_deadline_s,
            )
        except AstraflowError as error:
            replies = [error] * len(batch)
        except BaseException:
            # A defect or a stop: whoever waits must not wait for ever, and may push again.
            for waiting in batch:
                _answer(waiting.result, UnavailableError(_INTERRUPTED))
            raise
        for waiting, reply in zip(batch, replies, strict=True):
            _answer(waiting.result, reply)
        if context.recipe.snapshots:
            accepted = [
                waiting.episode
                for waiting, reply in zip(batch, replies, strict=True)
                if isinstance(reply, Committed) and reply.result.outcome in _ACCEPTED
            ]
            try:
                await self._rate(context, accepted)
            except AstraflowError as error:
                log.warning("ratings.missed", episodes=len(accepted), message=error.message)
        return [reply.completed for reply in replies if isinstance(reply, Committed) and reply.completed]

    async def _rate(self, context: RunContext, episodes: Sequence[trajectory_pb2.Episode]) -> None:
        """Change ratings by what these episodes ended with: once each, or never where the server dies here."""
        scored: dict[str, list[tuple[int, float]]] = {}
        for episode in episodes:
            for policy_id, draw, score in results(episode, context.recipe.snapshots):
                scored.setdefault(policy_id, []).append((draw, score))
        for policy_id, own in scored.items():
            draws = sorted({draw for draw, _ in own})
            announced = await self.store.versions.several(context.run_id, policy_id, draws)
            played = {version.version: version.snapshot_version for version in announced}
            rated = [(played[draw], score) for draw, score in own if draw in played]
            if rated:
                await self.store.versions.rate(context.run_id, policy_id, rated)

    async def _settle(self, context: RunContext, task: CompleteTask) -> None:
        bind(correlation_id=task_correlation(task.task_id), task_id=task.task_id)
        try:
            await self.settling.settle(context, task)
        except AstraflowError as error:
            # The task stays listed as unsettled: the run loop settles it.
            log.warning("group.settle_postponed", message=error.message)


def _answer(future: asyncio.Future[PushResult], reply: Committed | AstraflowError) -> None:
    if future.done():
        return  # the caller left; the commit stands and a repeated push answers DUPLICATE
    if isinstance(reply, AstraflowError):
        future.set_exception(reply)
    else:
        future.set_result(reply.result)
