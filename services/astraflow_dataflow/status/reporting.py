"""Reporting: the state of a run as the contract's StatusResponse, and as gauges.

The trajectory counts come from one atomic audit; nodes and evaluations are read beside it. An audit counts what a small
run holds; of a large one it has the counters, which a recount in slices compares with what is stored. Called by the
admin service, the pages, the metrics and the server, which asks for the recounts.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from astraflow.dataflow.v1 import admin_service_pb2, trace_pb2
from astraflow.dataflow.v1.account_pb2 import TrajectoryAccount
from astraflow.errors import NotFoundError
from astraflow.recipe import ModelSettings
from astraflow_dataflow.records import Audit, PolicyState, Recount, StoredEvaluation, timestamp
from astraflow_dataflow.rules.conservation import corrected, drift, recount
from astraflow_dataflow.rules.failures import TaskFailures
from astraflow_dataflow.rules.redis_health import ClockJumps
from astraflow_dataflow.rules.snapshots import Ratings
from astraflow_dataflow.rules.staleness import summarize
from astraflow_dataflow.rules.waits import Wait, current_waits
from astraflow_dataflow.runs.registry import RunContext
from astraflow_dataflow.runs.unreadable import reading
from astraflow_dataflow.status.autoscaling import autoscaling_message, stored
from astraflow_dataflow.status.balance import STEPS, balance, fleet
from astraflow_dataflow.status.gauges import RunGauges
from astraflow_dataflow.status.pools import pool_report
from astraflow_dataflow.status.redis_watch import RedisWatch
from astraflow_dataflow.status.service_waits import access_waits, archive_waits
from astraflow_dataflow.status.step_history import StepHistory
from astraflow_dataflow.status.tracing import note_published, task_trace, trained_steps
from astraflow_dataflow.status.wait_book import WaitBook
from astraflow_dataflow.store.runs import RUN_STATES
from astraflow_dataflow.store.store import Store
from astraflow_dataflow.versions.announcements import Versions
from astraflow_kit.identity.refusals import Refusals
from astraflow_kit.log import get_logger
from astraflow_kit.metrics import Metrics

log = get_logger(__name__)


@dataclass
class Reporting:
    """Builds status answers."""

    store: Store
    versions: Versions
    metrics: Metrics
    redis: RedisWatch
    steps: StepHistory
    refusals: Refusals
    trainer_lease_s: float
    """Time without a call after which a trainer is silent."""
    _clock: ClockJumps = field(default_factory=ClockJumps)
    _books: dict[str, WaitBook] = field(default_factory=dict)
    _large: dict[str, bool] = field(default_factory=dict)
    """Whether a run is too large to be counted in one call."""
    _recounts: dict[str, Recount] = field(default_factory=dict)
    """The newest recount of each large run that stood still for one."""

    async def status(self, context: RunContext) -> admin_service_pb2.StatusResponse:
        """Return the state of a run. Raises PreconditionError for one whose data cannot be read."""
        with reading(context.run_id):
            return await self._status(context)

    async def _status(self, context: RunContext) -> admin_service_pb2.StatusResponse:
        audit, account = await self.recount(context)
        nodes = await self.store.nodes.all(context.run_id, now_ms=audit.now_ms)
        evaluations = await self.store.evaluations.all(context.run_id)
        connected = [node for node in nodes if node.connected]
        waits = await self._waits(context, audit, nodes, evaluations)
        versions = {version.policy_id: version for version in await self.versions.newest(context)}
        note_lags(nodes, {policy_id: version.version for policy_id, version in versions.items()})
        self._gauges(context.run_id).fleet(connected, versions.values())
        policies = [policy_message(policy) for policy in audit.policies]
        for policy in policies:
            if policy.policy_id in versions:
                policy.version.CopyFrom(versions[policy.policy_id])
            if policy.policy_id in context.recipe.snapshots:
                rated = await self.store.versions.ratings(context.run_id, policy.policy_id)
                policy.ratings.extend(rating_messages(rated))
            note_origin(policy, context.recipe.policies[policy.policy_id].model)
        return admin_service_pb2.StatusResponse(
            state=RUN_STATES[audit.life],
            run_id=context.run_id,
            trajectories=account,
            policies=sorted(policies, key=lambda policy: policy.policy_id),
            nodes=nodes,
            evaluations=[message for item in evaluations for message in evaluation_messages(item)],
            waits=waits,
            dead_letters=audit.dead_letters,
            failures=await self._failures(context.run_id),
            stopped_for=await self.store.runs.stopped_for(context.run_id),
            archive=await self._archive(context),
            read_time=timestamp(audit.now_ms),
            shadows=self._shadows(context),
            routes=await self._routes(context.run_id),
            balances=await self._balances(context, nodes),
            autoscaling=await self._autoscaling(context, audit, nodes),
        )

    async def _balances(
        self, context: RunContext, nodes: Sequence[admin_service_pb2.NodeStatus]
    ) -> list[admin_service_pb2.Balance]:
        found = []
        for policy_id in context.policy_ids:
            newest = await self.store.admin.newest_steps(context.run_id, policy_id, limit=STEPS)
            found.append(balance(policy_id, [step.figures for step in newest], fleet(nodes)))
        verdicts = [verdict for verdict in found if verdict is not None]
        self._gauges(context.run_id).balances(verdicts)
        return verdicts

    async def _archive(self, context: RunContext) -> admin_service_pb2.ArchiveStatus | None:
        if context.recipe.dataflow.archive is None:
            return None
        state = await self.store.archive.state(context.run_id)
        self._gauges(context.run_id).archive(state)
        return admin_service_pb2.ArchiveStatus(
            waiting=state.waiting,
            waiting_bytes=state.waiting_bytes,
            written=state.written,
            written_bytes=state.written_bytes,
            given_up=state.given_up,
            problem=state.problem,
        )

    def _shadows(self, context: RunContext) -> list[admin_service_pb2.ShadowPlugin]:
        shadows = context.plugins.shadows.all() if context.is_made else []
        self._gauges(context.run_id).shadows(shadows)
        return [admin_service_pb2.ShadowPlugin(**vars(shadow)) for shadow in shadows]

    async def _routes(self, run_id: str) -> list[admin_service_pb2.RouteCount]:
        return [
            admin_service_pb2.RouteCount(
                verdict=count.verdict,
                policy_id=count.policy_id,
                groups=count.groups,
                trajectories=count.trajectories,
                mean_reward=count.reward_sum / count.trajectories,
            )
            for count in await self.store.audits.routed(run_id)
        ]

    async def nodes(self, context: RunContext) -> list[admin_service_pb2.NodeStatus]:
        """Return the nodes by id."""
        nodes = await self.store.nodes.all(
            context.run_id, now_ms=await self.store.connection.now_ms(context.run_id)
        )
        newest = await self.versions.newest(context)
        note_lags(nodes, {version.policy_id: version.version for version in newest})
        return nodes

    async def pools(self, context: RunContext) -> admin_service_pb2.PoolReportResponse:
        """Return load, capacity and target of each pool of nodes, and the tasks that more of them could take."""
        audit = await self.store.audits.audit(context.run_id)
        nodes = await self.store.nodes.all(context.run_id, now_ms=audit.now_ms)
        return pool_report(audit, nodes, await self._autoscaling(context, audit, nodes))

    async def _autoscaling(
        self, context: RunContext, audit: Audit, nodes: Sequence[admin_service_pb2.NodeStatus]
    ) -> admin_service_pb2.Autoscaling | None:
        settings = context.recipe.raas.autoscaling
        if settings is None:
            return None
        state = await stored(self.store.plugin_states, context.run_id)
        message = autoscaling_message(state, settings=settings, life=audit.life, nodes=nodes)
        self._gauges(context.run_id).autoscaling(message)
        return message

    def forget(self, run_id: str) -> None:
        """The run was deleted."""
        for known in (self._books, self._large, self._recounts):
            known.pop(run_id, None)
        self.metrics.forget(run=run_id)
        self.steps.forget(run_id)

    async def why(self, context: RunContext, task_id: str) -> admin_service_pb2.WhyResponse:
        """Return what each stage waits for, and everything known of a task when one is named.

        Raises NotFoundError, and PreconditionError for a run whose data cannot be read.
        """
        with reading(context.run_id):
            return await self._why(context, task_id)

    async def _why(self, context: RunContext, task_id: str) -> admin_service_pb2.WhyResponse:
        audit = await self.store.audits.audit(context.run_id)
        nodes = await self.store.nodes.all(context.run_id, now_ms=audit.now_ms)
        evaluations = await self.store.evaluations.all(context.run_id)
        return admin_service_pb2.WhyResponse(
            run_id=context.run_id,
            state=RUN_STATES[audit.life],
            waits=await self._waits(context, audit, nodes, evaluations),
            task=await self.trace(context, task_id) if task_id else None,
            failures=await self._failures(context.run_id),
            stopped_for=await self.store.runs.stopped_for(context.run_id),
            dead_letters=audit.dead_letters,
            read_time=timestamp(audit.now_ms),
            shadows=self._shadows(context),
            routes=await self._routes(context.run_id),
            balances=await self._balances(context, nodes),
            autoscaling=await self._autoscaling(context, audit, nodes),
        )

    async def trace(self, context: RunContext, task_id: str) -> trace_pb2.TaskTrace:
        """Return the life of a task. Raises NotFoundError for one that was never submitted."""
        stored = await self.store.admin.trace(context.run_id, task_id)
        if not stored.known:
            raise NotFoundError(
                f"run {context.run_id} never had a task {task_id!r}; the logs of nodes name those they ran"
            )
        trace = task_trace(stored)
        for policy_id, steps in trained_steps(trace).items():
            versions = await self.store.versions.of_steps(context.run_id, policy_id, steps)
            note_published(trace, policy_id, versions)
        return trace

    async def _failures(self, run_id: str) -> list[admin_service_pb2.TaskFailures]:
        return [failures_message(item) for item in await self.store.admin.failures(run_id)]

    async def _waits(
        self,
        context: RunContext,
        audit: Audit,
        nodes: Sequence[admin_service_pb2.NodeStatus],
        evaluations: Sequence[StoredEvaluation],
    ) -> list[admin_service_pb2.Wait]:
        connected = [node.node_id for node in nodes if node.connected]
        refused = await self.store.admin.refused(context.run_id, connected)
        self._clock.look(audit.now_ms, monotonic_s=time.monotonic())
        faults = context.faults
        self._gauges(context.run_id).plugin_faults(faults.all())
        waits = current_waits(
            audit,
            nodes,
            evaluations,
            faults=faults.current(),
            skipped=context.skipped,
            refused=refused,
            trainer_lease_s=self.trainer_lease_s,
            clock_jumped_ms=self._clock.jumped_ms,
            trains=context.recipe.trains,
        )
        seen, run_id = self.refusals, context.run_id
        waits += access_waits(seen.refused(run_id), seen.ending(run_id), seen.ended(run_id))
        if context.recipe.dataflow.archive is not None:
            archive = await self.store.archive.state(context.run_id)
            waits += archive_waits(archive, now_ms=audit.now_ms)
        book = self._books.setdefault(context.run_id, WaitBook())
        waited = book.waited_ms(waits, now_ms=audit.now_ms)
        self._gauges(context.run_id).waits(waited)
        told = [wait_message(wait, waited_ms, now_ms=audit.now_ms) for wait, waited_ms in waited]
        return [*self.redis_waits(context.run_id), *told]

    def redis_waits(self, run_id: str) -> list[admin_service_pb2.Wait]:
        """What the run's Redis, or the holder of payloads, lacks now, without asking it; empty when nothing."""
        now_ms = int(time.time() * 1000)
        problems = filter(None, (self.redis.problem(run_id), self.store.payloads.problem))
        return [
            wait_message(problem, lasted_ms(problem, now_ms=now_ms), now_ms=now_ms) for problem in problems
        ]

    def export_redis(self) -> None:
        """Bring the gauge of what any Redis lacks up to date, of each reason the longest."""
        now_ms, lasted_s = int(time.time() * 1000), dict[tuple[str, ...], float]()
        for problem in filter(None, (self.store.payloads.problem, *self.redis.problems)):
            reason = (problem.reason,)
            lasted_s[reason] = max(lasted_s.get(reason, 0.0), lasted_ms(problem, now_ms=now_ms) / 1000)
        self.metrics.replace("astraflow_dataflow_redis_wait_seconds", lasted_s)

    async def recount(self, context: RunContext) -> tuple[Audit, TrajectoryAccount]:
        """Return one snapshot and where its trajectories are; a defect is logged with the drift of each counter."""
        audit = await self.store.audits.audit(context.run_id)
        self._large[context.run_id] = not audit.is_whole
        if not audit.is_whole and (found := self._recounts.get(context.run_id)):
            audit = corrected(audit, found)
        trained = 0
        for policy in audit.policies:
            trained += await self.store.audits.trained_in_log(
                context.run_id, policy.policy_id, through=policy.last_consumed
            )
        account = recount(audit, trained_in_log=trained)
        if account.conservation_error:
            log.error(
                "conservation.broken",
                run_id=context.run_id,
                error=account.conservation_error,
                drift=drift(audit, trained_in_log=trained),
            )
        for policy in audit.policies:
            if policy.outstanding != policy.charged:
                counts = {"outstanding": policy.outstanding, "charged": policy.charged}
                log.error("credit.broken", run_id=context.run_id, policy_id=policy.policy_id, **counts)
        self._gauges(context.run_id).account(audit.policies, account)
        return audit, account

    async def recount_large(self, context: RunContext) -> None:
        """Count a run again that is too large for one call, in slices. While groups move all the time it cannot be, and
        what was found before stands.
        """
        if not self._large.get(context.run_id):
            return
        found = await self.store.audits.recount(context.run_id)
        if found is not None:
            self._recounts[context.run_id] = found

    def _gauges(self, run_id: str) -> RunGauges:
        return RunGauges(self.metrics, run_id)


def failures_message(failures: TaskFailures) -> admin_service_pb2.TaskFailures:
    """Return the contract's form of failures that are alike."""
    return admin_service_pb2.TaskFailures(
        reason=failures.reason,
        detail=failures.detail,
        count=failures.count,
        in_a_row=failures.in_a_row,
        task_id=failures.task_id,
        node_id=failures.node_id,
        first_time=timestamp(failures.first_ms),
        last_time=timestamp(failures.last_ms),
    )


def lasted_ms(problem: Wait, *, now_ms: int) -> int:
    """How long something has been so that knows when it began; 0 where it does not."""
    return max(0, now_ms - (problem.since_ms or now_ms))


def note_lags(nodes: Sequence[admin_service_pb2.NodeStatus], newest: Mapping[str, int]) -> None:
    """Say of each node by how many versions it is behind."""
    for node in nodes:
        for policy_id, version in node.serving_versions.items():
            node.version_lags[policy_id] = max(0, newest.get(policy_id, version) - version)


def policy_message(policy: PolicyState) -> admin_service_pb2.PolicyStatus:
    """Return the contract's form of a policy's state, its version left out."""
    ages = summarize(policy.staleness)
    return admin_service_pb2.PolicyStatus(
        policy_id=policy.policy_id,
        frozen=policy.frozen,
        external=policy.external,
        last_finished_step=policy.finished_step,
        trainer_epoch=policy.epoch,
        outstanding_groups=policy.outstanding,
        ready_groups=policy.ready,
        unpublished_groups=policy.unpublished,
        acceptance=policy.acceptance,
        credit=policy.credit,
        staleness=admin_service_pb2.StalenessSummary(p50=ages.p50, p99=ages.p99, max=ages.largest),
        recent_training_reward=mean_reward(policy.recent),
        no_credit_trajectories=policy.no_credit,
        credit_error=policy.outstanding - policy.charged,
        waits_for_turn_of=policy.waits_for_turn_of,
    )


def rating_messages(ratings: Ratings) -> list[admin_service_pb2.SnapshotRating]:
    """Return the contract's form of ratings, the trained policy first."""
    ordered = sorted(ratings.items(), key=lambda item: -1 if item[0] is None else item[0])
    return [
        admin_service_pb2.SnapshotRating(version=version, rating=rating, episodes=episodes)
        for version, (rating, episodes) in ordered
    ]


def note_origin(policy: admin_service_pb2.PolicyStatus, model: ModelSettings) -> None:
    """Say which version of another run the policy started with, if it did."""
    if (start := model.from_version) is not None:
        policy.origin.run_id, policy.origin.policy_id = start.run, start.policy
        policy.origin.version = start.version
        if start.step is not None:
            policy.origin.step = start.step


def mean_reward(recent: Sequence[tuple[float, int]]) -> float:
    """Return the mean over (sum, count) pairs; NaN when there is nothing."""
    count = sum(number for _, number in recent)
    return sum(total for total, _ in recent) / count if count else math.nan


def evaluation_messages(item: StoredEvaluation) -> list[admin_service_pb2.Evaluation]:
    """Return the contract's form of a pass: one message for each policy, none while it waits for its turn."""
    if item.state == "waiting":
        return []
    return [_evaluation_message(item, policy_id) for policy_id in item.versions]


def _evaluation_message(item: StoredEvaluation, policy_id: str) -> admin_service_pb2.Evaluation:
    own = {role: mean for (policy, role), mean in item.rewards.items() if policy == policy_id}
    message = admin_service_pb2.Evaluation(
        evaluation_id=item.evaluation_id,
        policy_id=policy_id,
        version=item.versions[policy_id],
        num_samples=item.samples.get(policy_id, 0),
        num_planned=item.planned,
        mean_reward=math.nan if item.is_scarce else mean_reward(list(own.values())),
        complete=item.state != "open",
        final=item.final,
        samples_per_task=item.samples_per_task,
        versions=item.versions,
        metrics={name: total / number for name, (total, number) in item.metrics.items()},
    )
    for role, (total, number) in sorted(own.items()):
        message.roles.add(role=role, num_samples=number, mean_reward=total / number)
    if item.complete_ms:
        message.complete_time.CopyFrom(timestamp(item.complete_ms))
    return message


def wait_message(wait: Wait, waited_ms: int, *, now_ms: int) -> admin_service_pb2.Wait:
    """Return the contract's form of a wait."""
    message = admin_service_pb2.Wait(
        stage=wait.stage,
        policy_id=wait.policy_id,
        reason=wait.reason,
        detail=wait.detail,
        since_time=timestamp(now_ms - waited_ms),
        released_by=wait.released_by,
        progress=wait.progress,
    )
    message.waited_duration.FromMilliseconds(waited_ms)
    return message
