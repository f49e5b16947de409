"""Ingest: pushed episodes are validated, committed in micro-batches, and their groups settled.

An acknowledgement is given only after Redis answered the commit. Whatever arrived while one commit was in
flight goes into the next, so the cost per episode falls under load and the latency does not rise without. One
per process, made by `server`; called by the trajectory service.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from astraflow.dataflow.v1.trajectory_service_pb2 import Outcome, PushResult
from astraflow.errors import AstraflowError, UnavailableError, UnknownVersionError
from astraflow.rollout.v1 import trajectory_pb2
from astraflow.trajectories import BadTrajectory
from astraflow_dataflow.episodes.settling import Settling
from astraflow_dataflow.records import CompleteTask
from astraflow_dataflow.rules import evaluation
from astraflow_dataflow.rules.snapshots import results
from astraflow_dataflow.rules.trajectories import Expectation, check_episode, unknown_version
from astraflow_dataflow.runs import background
from astraflow_dataflow.runs.leased import WholeTask
from astraflow_dataflow.runs.registry import RunContext, RunRegistry
from astraflow_dataflow.store.durability import Durability
from astraflow_dataflow.store.episodes.commits import ACCEPTED, Pushed
from astraflow_dataflow.store.store import Store
from astraflow_kit import failpoints, traces
from astraflow_kit.log import bind, get_logger
from astraflow_kit.metrics import Metrics
from astraflow_kit.unit_of_work import task_correlation

log = get_logger(__name__)

EPISODES_PER_COMMIT = 64
"""When this many are there, no more are waited for; a commit holds Redis for a millisecond or two."""
TASKS_PER_COMMIT = 16
"""What is read and written of a task costs a commit as much as several of its episodes."""
_CHECKED_AT_ONCE = 16
"""Trajectories that are checked before others have their turn."""
_VERSION_GRACE_S = 1.0
_INTERRUPTED = "the commit was interrupted; push again"


@dataclass(frozen=True)
class _Waiting:
    episodes: Sequence[trajectory_pb2.Episode]
    pushed: asyncio.Future[Sequence[Pushed]]
    whole: Sequence[WholeTask]
    """The tasks that the episodes are all of; empty when they are not all of any, or others too."""

    @property
    def tasks(self) -> set[str]:
        """Ids of the episodes' tasks."""
        return {episode.task_id for episode in self.episodes}


@dataclass
class Ingest:
    """The push path of this process: per run one queue and one loop that commits what is in it."""

    store: Store
    registry: RunRegistry
    settling: Settling
    metrics: Metrics
    durability: Durability
    _queues: dict[str, tuple[RunContext, asyncio.Queue[_Waiting]]] = field(default_factory=dict)

    async def push(self, context: RunContext, episodes: Sequence[trajectory_pb2.Episode]) -> list[Pushed]:
        """Take episodes in and return what became of each, after the commit has reached the durability asked for.

        An episode's error is UnknownVersionError for a version not announced yet, PayloadMissingError when the push
        must be repeated. Raises UnavailableError when Redis is away.
        """
        started_s, began_s = asyncio.get_running_loop().time(), time.time()
        # A stream carries many tasks, so its metadata cannot say which one this line is about: the first one here.
        bind(correlation_id=task_correlation(episodes[0].task_id), task_id=episodes[0].task_id)
        await self._wait_for_versions(context, episodes)
        problems = await _problems(context, episodes)
        judged = list(zip(episodes, problems, strict=True))
        bad = [(one, problem) for one, problem in judged if isinstance(problem, BadTrajectory)]
        good = [one for one, problem in judged if problem is None]
        refused = iter(await self._quarantine(context, bad) if bad else ())
        committed = iter(await self._enqueue(context, good) if good else ())
        pushed = [
            next(committed)
            if problem is None
            else next(refused)
            if isinstance(problem, BadTrajectory)
            else problem
            for problem in problems
        ]
        for episode, result in zip(episodes, pushed, strict=True):
            _record(context, episode, result, began_s=began_s)
            if episode.hedge and isinstance(result, PushResult):
                self.metrics.increment(
                    "astraflow_dataflow_hedges_total", outcome=_outcome_name(result.outcome)
                )
        await self._acknowledge(context, [one for one in pushed if isinstance(one, PushResult)])
        self.metrics.observe("astraflow_dataflow_push_seconds", asyncio.get_running_loop().time() - started_s)
        return pushed

    async def _acknowledge(self, context: RunContext, taken: Sequence[PushResult]) -> None:
        """Wait until what was taken is as durable as it must be."""
        if not taken:
            return
        self.durability.note(context.run_id, max(result.position for result in taken))
        await self.durability.barrier(context.run_id)
        for result in taken:
            result.durability = self.durability.reached(context.run_id)
        for outcome, number in Counter(result.outcome for result in taken).items():
            self.metrics.increment("astraflow_dataflow_pushes_total", number, outcome=_outcome_name(outcome))

    async def _quarantine(
        self, context: RunContext, refused: Sequence[tuple[trajectory_pb2.Episode, BadTrajectory]]
    ) -> Sequence[Pushed]:
        for episode, problem in refused:
            log.warning(
                "episode.quarantined",
                correlation_id=task_correlation(episode.task_id),
                task_id=episode.task_id,
                reason=problem.slug,
                detail=problem.detail,
            )
        return await self.store.episodes.quarantine(context.run_id, refused)

    async def _wait_for_versions(
        self, context: RunContext, episodes: Sequence[trajectory_pb2.Episode]
    ) -> None:
        """Give announcements that are on their way a moment to arrive."""

        def all_known() -> bool:
            newest = context.newest_versions
            return all(unknown_version(episode, newest_versions=newest) is None for episode in episodes)

        if all_known():
            return
        topics = [f"version {policy_id}" for policy_id in context.policy_ids]
        with context.wakeups.subscribe(*topics) as news:
            await self.registry.refresh_versions(context)
            if not all_known():
                await news.wait(_VERSION_GRACE_S)
                await self.registry.refresh_versions(context)

    async def _enqueue(
        self, context: RunContext, episodes: Sequence[trajectory_pb2.Episode]
    ) -> Sequence[Pushed]:
        queue, loop = self._queue_of(context), asyncio.get_running_loop()
        portions = [
            _Waiting(portion, loop.create_future(), context.leased.take_whole(portion))
            for portion in _portions(episodes)
        ]
        for waiting in portions:
            await queue.put(waiting)
        answers = await asyncio.gather(*(waiting.pushed for waiting in portions), return_exceptions=True)
        results = list[Pushed]()
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            results += answer
        for _ in results:
            failpoints.hit("dataflow.committed")
        return results

    def _queue_of(self, context: RunContext) -> asyncio.Queue[_Waiting]:
        """The run's queue; its loops are started on first use and end with the context."""
        owner, queue = self._queues.get(context.run_id, (None, None))
        if queue is None or owner is not context:
            queue, complete = asyncio.Queue(maxsize=4 * EPISODES_PER_COMMIT), asyncio.Queue[CompleteTask]()
            self._queues[context.run_id] = (context, queue)
            for name, work in (
                ("ingest", partial(self._run, context, queue, complete)),
                ("settle", partial(self._settle, context, complete)),
            ):
                context.tasks.append(background.start(work, name=name, run_id=context.run_id))
        return queue

    async def _run(
        self, context: RunContext, queue: asyncio.Queue[_Waiting], complete: asyncio.Queue[CompleteTask]
    ) -> None:
        """Commit what arrives, until cancelled. Groups are settled beside the next commits."""
        held: list[_Waiting] = []  # what was too much for the commit before, or is of the other kind
        try:
            while True:
                batch, held = held or [await queue.get()], []
                while not (held or queue.empty() or _is_enough(batch)):
                    one = queue.get_nowait()
                    tasks = one.tasks.union(*(waiting.tasks for waiting in batch))
                    fits = len(tasks) <= TASKS_PER_COMMIT and bool(one.whole) == bool(batch[0].whole)
                    (batch if fits else held).append(one)
                for task in await self._commit(context, batch):
                    complete.put_nowait(task)
        finally:
            while not queue.empty():
                held.append(queue.get_nowait())
            for waiting in held:
                _answer(waiting.pushed, UnavailableError(_INTERRUPTED, retry_after_s=0.2))

    async def _commit(self, context: RunContext, batch: Sequence[_Waiting]) -> list[CompleteTask]:
        """Commit a batch, answer its pushers, and return the tasks it completed."""
        failpoints.hit("dataflow.storing")
        episodes = [episode for waiting in batch for episode in waiting.episodes]
        try:
            pushed, completed = await self._stored(context, batch, episodes)
        except BaseException as error:
            # A defect or a stop: whoever waits must not wait for ever, and may push again.
            told = error if isinstance(error, AstraflowError) else UnavailableError(_INTERRUPTED)
            for waiting in batch:
                _answer(waiting.pushed, told)
            if told is error:
                return []
            raise
        answers = iter(pushed)
        for waiting in batch:
            _answer(waiting.pushed, [next(answers) for _ in waiting.episodes])
        if context.recipe.snapshots:
            accepted = [
                episode
                for episode, result in zip(episodes, pushed, strict=True)
                if isinstance(result, PushResult) and result.outcome in ACCEPTED
            ]
            try:
                await self._rate(context, accepted)
            except AstraflowError as error:
                log.warning("ratings.missed", episodes=len(accepted), message=error.message)
        return completed

    async def _stored(
        self, context: RunContext, batch: Sequence[_Waiting], episodes: Sequence[trajectory_pb2.Episode]
    ) -> tuple[list[Pushed], list[CompleteTask]]:
        """What became of each episode of a batch, and the tasks that are complete and wait to be settled."""
        tasks = [task for waiting in batch for task in waiting.whole]
        whole = await self.settling.commit_whole(context, tasks) if tasks else {}
        rest = [episode for episode in episodes if episode.task_id not in whole]
        pushed, completed = list[Pushed](), list[CompleteTask]()
        if rest:
            pushed, completed = await self.store.episodes.commit(
                context.run_id, rest, horizon_s=context.recipe.dataflow.group_deadline_s
            )
        answers = {task_id: iter(own) for task_id, own in whole.items()}
        others = iter(pushed)
        return [next(answers.get(episode.task_id, others)) for episode in episodes], completed

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

    async def _settle(self, context: RunContext, complete: asyncio.Queue[CompleteTask]) -> None:
        """Settle tasks until cancelled, all that were completed since the last ones together."""
        while True:
            tasks = [await complete.get()]
            while not complete.empty():
                tasks.append(complete.get_nowait())
            bind(correlation_id=task_correlation(tasks[0].task_id), task_id=tasks[0].task_id)
            try:
                await self.settling.settle(context, tasks)
            except AstraflowError as error:
                # The tasks stay listed as unsettled: the run loop settles them.
                log.warning("group.settle_postponed", message=error.message)


def _portions(episodes: Sequence[trajectory_pb2.Episode]) -> list[list[trajectory_pb2.Episode]]:
    """The episodes in order, in parts of no more tasks than one commit takes."""
    portions, tasks = list[list[trajectory_pb2.Episode]](), set[str]()
    for episode in episodes:
        tasks.add(episode.task_id)
        if not portions or len(tasks) > TASKS_PER_COMMIT:
            portions.append([])
            tasks = {episode.task_id}
        portions[-1].append(episode)
    return portions


def _is_enough(batch: Sequence[_Waiting]) -> bool:
    return sum(len(waiting.episodes) for waiting in batch) >= EPISODES_PER_COMMIT


async def _problems(
    context: RunContext, episodes: Sequence[trajectory_pb2.Episode]
) -> list[BadTrajectory | UnknownVersionError | None]:
    """What is wrong with each episode."""
    problems, checked = list[BadTrajectory | UnknownVersionError | None](), 0
    expectations = dict[str, Expectation]()
    for episode in episodes:
        # Of training tasks all is expected alike.
        task_id = episode.task_id if evaluation.is_evaluation_task(episode.task_id) else ""
        if task_id not in expectations:
            expectations[task_id] = _expectation(context, task_id)
        problems.append(_problem(episode, expectations[task_id]))
        checked += len(episode.trajectories)
        if checked >= _CHECKED_AT_ONCE:
            checked = 0
            await asyncio.sleep(0)
    return problems


def _expectation(context: RunContext, task_id: str) -> Expectation:
    return Expectation(
        newest_versions=context.newest_versions,
        roles=context.trained_roles,
        row_limits=context.recipe.row_limits,
        max_abs_reward=context.recipe.dataflow.max_abs_reward,
        demand=evaluation.demand_of(task_id, context.trained_policies),
        blob_prefix=context.blob_prefix,
    )


def _problem(
    episode: trajectory_pb2.Episode, expectation: Expectation
) -> BadTrajectory | UnknownVersionError | None:
    if sentence := unknown_version(episode, newest_versions=expectation.newest_versions):
        return UnknownVersionError(sentence, retry_after_s=1.0)
    try:
        check_episode(episode, expectation)
    except BadTrajectory as problem:
        return problem
    return None


def _record(context: RunContext, episode: trajectory_pb2.Episode, result: Pushed, *, began_s: float) -> None:
    """Record the push of an episode in the trace of its task."""
    if place := traces.episode(context.run.identity, episode.task_id, episode.episode_id):
        outcome = _outcome_name(result.outcome) if isinstance(result, PushResult) else result.reason
        traces.record("push", began_s=began_s, under=place, attributes={"astraflow.outcome": outcome})


def _outcome_name(outcome: Outcome.ValueType) -> str:
    return Outcome.Name(outcome).removeprefix("OUTCOME_").lower()


def _answer(future: asyncio.Future[Sequence[Pushed]], reply: Sequence[Pushed] | AstraflowError) -> None:
    if future.done():
        return  # the caller left; the commit stands and a repeated push answers DUPLICATE
    if isinstance(reply, AstraflowError):
        future.set_exception(reply)
    else:
        future.set_result(reply)
