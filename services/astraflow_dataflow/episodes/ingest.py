"""Ingest: pushed episodes are validated, committed in micro-batches, and their groups settled.

An acknowledgement is given only after Redis answered the commit. Whatever arrived while one pipeline was in
flight goes into the next, so the cost per episode falls under load and the latency does not rise without. One
`Ingest` per run and process; called by the trajectory service.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from astraflow.errors import (
    AstraflowError,
    InvalidArgumentError,
    PayloadMissingError,
    UnavailableError,
    UnknownVersionError,
)
from astraflow.rollout.v1 import trajectory_pb2
from astraflow.trajectories import BadTrajectory
from astraflow_dataflow.episodes.settling import Settling
from astraflow_dataflow.records import CommitReply, CompleteTask, Outcome, PushedEpisode, PushedItem, Refusal
from astraflow_dataflow.rules import evaluation
from astraflow_dataflow.rules.trajectories import Expectation, check_episode, unknown_version
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
_MAX_SAMPLE_BYTES = 64 * 1024
_MAX_MEMBER = 1024
_INTERRUPTED = "the commit was interrupted; push again"


@dataclass(frozen=True, kw_only=True)
class PushOutcome:
    """What became of a push; `reason` and `detail` are set for POISON."""

    outcome: Outcome
    reason: str = ""
    detail: str = ""
    run_id: str = ""
    position: int = 0
    """Position of the commit in the run."""


@dataclass(frozen=True)
class _Waiting:
    episode: PushedEpisode
    reply: asyncio.Future[CommitReply]


class Ingest:
    """The push path of one run in this process."""

    def __init__(
        self,
        context: RunContext,
        *,
        store: Store,
        registry: RunRegistry,
        settling: Settling,
        metrics: Metrics,
        durability: Durability,
    ) -> None:
        self.context = context
        self._store = store
        self._registry = registry
        self._settling = settling
        self._metrics = metrics
        self._durability = durability
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue(maxsize=4 * EPISODES_PER_PIPELINE)

    async def run(self) -> None:
        """Commit what arrives, until cancelled. Groups are settled beside the next commits."""
        try:
            async with asyncio.TaskGroup() as settlers:
                while True:
                    batch = [await self._queue.get()]
                    while len(batch) < EPISODES_PER_PIPELINE and not self._queue.empty():
                        batch.append(self._queue.get_nowait())
                    for task in await self._commit(batch):
                        settlers.create_task(self._settle(task), name=f"settle {task.task_id}")
        finally:
            while not self._queue.empty():
                _answer(self._queue.get_nowait().reply, UnavailableError(_INTERRUPTED, retry_after_s=0.2))

    async def push(self, episode: trajectory_pb2.Episode) -> PushOutcome:
        """Take one episode in and return what became of it, after the commit has reached the durability asked for.

        Raises InvalidArgumentError without a task or member, UnknownVersionError for a version not announced yet,
        PayloadMissingError when the push must be repeated, UnavailableError when Redis is away.
        """
        started_s = asyncio.get_running_loop().time()
        self._require_address(episode)
        # A stream carries many tasks, so its metadata cannot say which one this line is about.
        bind(correlation_id=task_correlation(episode.task_id), task_id=episode.task_id)
        await self._wait_for_version(episode)
        demand = evaluation.demand_of(episode.task_id)
        expectation = Expectation(
            newest_versions=self.context.newest_versions, demand=demand, blob_prefix=self.context.blob_prefix
        )
        try:
            check_episode(episode, expectation)
        except BadTrajectory as problem:
            outcome = await self._quarantine(episode, problem)
        else:
            outcome = await self._enqueue(episode)
        self._durability.note(self.context.run_id, outcome.position)
        await self._durability.barrier()
        self._metrics.increment("astraflow_dataflow_pushes_total", outcome=outcome.outcome.value.lower())
        self._metrics.observe(
            "astraflow_dataflow_push_seconds", asyncio.get_running_loop().time() - started_s
        )
        return outcome

    def _require_address(self, episode: trajectory_pb2.Episode) -> None:
        if not episode.task_id or episode.member >= _MAX_MEMBER:
            raise InvalidArgumentError(
                f"an episode needs a task_id and a member below {_MAX_MEMBER}; got task_id "
                f"{episode.task_id!r}, member {episode.member}"
            )

    async def _wait_for_version(self, episode: trajectory_pb2.Episode) -> None:
        """Give an announcement that is on its way a moment to arrive."""
        context = self.context
        if unknown_version(episode, newest_versions=context.newest_versions) is None:
            return
        topics = [f"version {policy_id}" for policy_id in context.policy_ids]
        with context.wakeups.subscribe(*topics) as news:
            await self._registry.refresh_versions(context)
            if unknown_version(episode, newest_versions=context.newest_versions) is None:
                return
            await news.wait(_VERSION_GRACE_S)
            await self._registry.refresh_versions(context)
        sentence = unknown_version(episode, newest_versions=context.newest_versions)
        if sentence is not None:
            raise UnknownVersionError(sentence, retry_after_s=1.0)

    async def _enqueue(self, episode: trajectory_pb2.Episode) -> PushOutcome:
        reply: asyncio.Future[CommitReply] = asyncio.get_running_loop().create_future()
        await self._queue.put(_Waiting(pushed_episode(episode), reply))
        committed = await reply
        failpoints.hit("dataflow.committed")
        if committed.outcome is None:
            raise PayloadMissingError(
                f"the payload of episode {episode.episode_id} is gone; push it again", retry_after_s=0.1
            )
        reason = committed.detail if committed.outcome in (Outcome.POISON, Outcome.LATE_CLOSED) else ""
        return PushOutcome(
            outcome=committed.outcome, reason=reason, run_id=self.context.run_id, position=committed.position
        )

    async def _commit(self, batch: Sequence[_Waiting]) -> list[CompleteTask]:
        """Commit a batch, answer its pushers, and return the tasks it completed."""
        failpoints.hit("dataflow.storing")
        episodes = [waiting.episode for waiting in batch]
        try:
            replies = await self._store.episodes.commit(
                self.context.run_id,
                episodes,
                evaluations=[evaluation.is_evaluation_task(episode.task_id) for episode in episodes],
                horizon_s=self.context.recipe.dataflow.group_deadline_s,
            )
        except AstraflowError as error:
            replies = [error] * len(batch)
        except BaseException:
            # A defect or a stop: whoever waits must not wait for ever, and may push again.
            for waiting in batch:
                _answer(waiting.reply, UnavailableError(_INTERRUPTED))
            raise
        for waiting, reply in zip(batch, replies, strict=True):
            _answer(waiting.reply, reply)
        return [reply.completed for reply in replies if isinstance(reply, CommitReply) and reply.completed]

    async def _settle(self, task: CompleteTask) -> None:
        bind(correlation_id=task_correlation(task.task_id), task_id=task.task_id)
        try:
            await self._settling.settle(self.context, task)
        except AstraflowError as error:
            # The task stays listed as unsettled: the run loop settles it.
            log.warning("group.settle_postponed", message=error.message)

    async def _quarantine(self, episode: trajectory_pb2.Episode, problem: BadTrajectory) -> PushOutcome:
        refusal = Refusal(
            task_id=episode.task_id,
            episode_id=episode.episode_id[:128],
            member=episode.member,
            attempt=episode.attempt,
            node_id=episode.node_id[:64],
            reason=problem.slug,
            detail=problem.detail[:2048],
            num_trajectories=len(episode.trajectories),
            sample=episode.SerializeToString()[:_MAX_SAMPLE_BYTES],
        )
        outcome, reason, position = await self._store.episodes.quarantine(self.context.run_id, refusal)
        log.warning("episode.quarantined", reason=problem.slug, detail=problem.detail)
        return PushOutcome(
            outcome=outcome,
            reason=reason,
            detail=problem.detail if reason == problem.slug else "",
            run_id=self.context.run_id,
            position=position,
        )


def pushed_episode(episode: trajectory_pb2.Episode) -> PushedEpisode:
    """Return the domain form of a valid episode."""
    return PushedEpisode(
        task_id=episode.task_id,
        episode_id=episode.episode_id,
        member=episode.member,
        attempt=episode.attempt,
        node_id=episode.node_id,
        failed=episode.status == trajectory_pb2.EPISODE_STATUS_FAILED,
        hedge=episode.hedge,
        items=tuple(_pushed_item(item) for item in episode.trajectories),
    )


def _pushed_item(item: trajectory_pb2.TrajectoryItem) -> PushedItem:
    return PushedItem(
        trajectory_id=item.header.trajectory_id,
        policy_id=item.header.policy_id,
        role=item.header.role,
        min_version=item.header.min_version,
        max_version=item.header.max_version,
        reward=item.header.reward,
        header=item.header.SerializeToString(),
        body=item.body,
    )


def _answer(future: asyncio.Future[CommitReply], reply: CommitReply | AstraflowError) -> None:
    if future.done():
        return  # the caller left; the commit stands and a repeated push answers DUPLICATE
    if isinstance(reply, AstraflowError):
        future.set_exception(reply)
    else:
        future.set_result(reply)
