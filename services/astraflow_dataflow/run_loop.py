"""The run loop: what must happen in a run without anybody calling.

Expired leases and groups are swept, tasks left behind are settled, data sets are asked for tasks, evaluations
are planned, fed and given up, and a finishing run is brought to its end. Every action is an idempotent call
on Redis, so each server process may conduct every run. Event driven, with a sweep every half second while there is
something that time may end. One per run and process, made by `server`.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from astraflow.errors import AstraflowError, NotFoundError, PluginError
from astraflow_dataflow.episodes.settling import Settling
from astraflow_dataflow.records import Life, StoredEvaluation
from astraflow_dataflow.rules import evaluation
from astraflow_dataflow.rules.failures import why_stopped
from astraflow_dataflow.runs.registry import RunContext, RunRegistry
from astraflow_dataflow.store.store import Store
from astraflow_dataflow.tasks.curation import Curation
from astraflow_dataflow.versions.snapshots import Snapshots
from astraflow_kit.clock import Clock
from astraflow_kit.log import get_logger
from astraflow_kit.metrics import Metrics

log = get_logger(__name__)

SWEEP_S = 0.5
IDLE_S = 60.0
"""Between looks at a run in which nothing is leased, evaluated or late; whatever begins there is an event."""
_SWEEP_LIMIT = 64
_MIN_GAP_S = 0.05
"""Between two looks: settled groups come in hundreds a second, and each lets tasks be asked for."""
_RETRY_S = 1.0


@dataclass
class _Progress:
    """When an evaluation last moved, by our clock."""

    finished: int
    since_s: float
    held_since_s: float | None = None
    """Since when a newer version has waited for it."""


@dataclass
class RunLoop:
    """Conducts one run."""

    context: RunContext
    registry: RunRegistry
    store: Store
    settling: Settling
    curation: Curation
    snapshots: Snapshots
    metrics: Metrics
    clock: Clock
    patience_s: float
    """Time without progress after which a superseded evaluation is given up."""
    _progress: dict[str, _Progress] = field(default_factory=dict)
    _late: frozenset[str] = frozenset()
    _finished: bool = False
    """Nothing is due until the run is continued."""
    _busy: bool = False
    """An evaluation is open or the run is finishing: every wake-up may be the one that moves it."""
    _sweep_at_s: float = 0.0

    async def run(self) -> None:
        """Conduct until the task is cancelled."""
        topics = ["work", "run", "due", *(f"version {policy_id}" for policy_id in self.context.policy_ids)]
        with self.context.wakeups.subscribe(*topics) as news:
            while True:
                try:
                    rest_s = self._sweep_at_s - self.clock.monotonic_s()
                    await self._step({event.topic for event in await news.wait(rest_s)})
                except NotFoundError:
                    await self.registry.forget(self.context.run_id)
                    return
                except AstraflowError as error:
                    self._sweep_at_s = 0.0
                    log.warning(
                        "run_loop.postponed",
                        run_id=self.context.run_id,
                        reason=error.reason,
                        message=error.message,
                    )
                    await asyncio.sleep(_RETRY_S)
                await asyncio.sleep(_MIN_GAP_S)

    async def _step(self, topics: set[str]) -> None:
        """Answer a wake-up; `work` comes with every settled group, so alone it costs one call until the next sweep."""
        now_s = self.clock.monotonic_s()
        if "run" in topics:
            await self.registry.refresh_plugins(self.context)
        if self._finished and "run" not in topics and now_s < self._sweep_at_s:
            return
        if topics - {"work"} or self._busy or now_s >= self._sweep_at_s:
            self._sweep_at_s = now_s + await self.tick()
        else:
            self._sweep_at_s = min(self._sweep_at_s, now_s + SWEEP_S)
            await self._feed_training()

    async def tick(self) -> float:
        """Do once whatever is due. Returns for how long nothing is, in seconds, unless there is news."""
        run_id = self.context.run_id
        pending = await self.store.batches.pending(run_id)
        if pending.num_open:
            await self._sweep()
            await self.settling.settle_left_behind(self.context)
        self._alarm(pending.late_batches)
        released = 0
        for policy_id in self.context.policy_ids:
            released += await self.store.batches.release_durable(run_id, policy_id)
        life = pending.life
        await self.registry.refresh_versions(self.context)
        if life is not Life.FINISHED:
            await self.snapshots.announce(self.context)
        if life is Life.ACTIVE:
            life = await self._stop_failing()
        is_fed = life is not Life.ACTIVE or await self._feed_training()
        if life is not Life.FINISHED:
            await self._evaluate(life)
        self._finished = life is Life.FINISHED
        is_over = self._finished or not (self._busy or pending.num_open)
        self.context.is_idle = is_over and is_fed and not (released or pending.late_batches)
        if not self.context.is_idle:
            return SWEEP_S
        return IDLE_S if pending.next_late_s is None else min(IDLE_S, pending.next_late_s)

    async def _stop_failing(self) -> Life:
        """End the run when every task fails in the same way; returns its life."""
        failures = await self.store.admin.failures(self.context.run_id)
        most = self.context.recipe.dataflow.max_identical_failures
        reason = why_stopped(failures, most_in_a_row=most)
        if not reason:
            return Life.ACTIVE
        log.error("run.stopped", run_id=self.context.run_id, reason=reason)
        await self.store.runs.advance(self.context.run_id, Life.FINISHING, stopped_for=reason)
        return Life.FINISHING

    async def _sweep(self) -> None:
        """Give back all that is over, in slices that hold Redis for a moment each."""
        leases = groups = 0
        is_full = True
        while is_full:
            expired, closed = await self.store.tasks.sweep(self.context.run_id, limit=_SWEEP_LIMIT)
            leases, groups = leases + expired, groups + closed
            is_full = max(expired, closed) == _SWEEP_LIMIT
        if leases:
            self.metrics.increment("astraflow_dataflow_leases_expired_total", leases)
            log.info("leases.expired", run_id=self.context.run_id, count=leases)
        if groups:
            log.info("groups.closed", run_id=self.context.run_id, count=groups, reason="deadline")

    async def _feed_training(self) -> bool:
        """Ask for tasks. Returns False when the data set must be asked again though nothing happens."""
        if not self.context.is_made:
            return False
        try:
            await self.curation.feed_training(self.context)
        except PluginError as error:
            self._report_plugin(error)
            return False
        self.context.faults.clear("dataset", self.context.recipe.run.data_name)
        return not self.context.skipped

    def _report_plugin(self, error: PluginError) -> None:
        name = self.context.recipe.run.data_name
        if self.context.faults.note("dataset", name, error):
            log.error("dataset.failed", run_id=self.context.run_id, message=error.message)

    def _alarm(self, late: frozenset[str]) -> None:
        for batch_id in late - self._late:
            log.warning(
                "batch.lease_expired",
                batch_id=batch_id,
                remedy="start the policy's trainer again; it gets the same batch",
            )
        self._late = late

    async def _evaluate(self, life: Life) -> None:
        newest, policies = self.context.newest_trained, self.context.trained_policies
        if life is Life.FINISHING and await self.store.runs.stopped_for(self.context.run_id):
            newest = {}  # what fails in every task would fail in the final evaluation, too
        evaluations = await self.store.evaluations.current(self.context.run_id)
        # One pass evaluates all policies, so each must have a version.
        if newest and len(newest) == len(policies) and await self._plan(newest, evaluations, life):
            evaluations = await self.store.evaluations.current(self.context.run_id)
        self._busy = life is Life.FINISHING or any(item.state == "open" for item in evaluations)
        for item in evaluations:
            if item.state == "open":
                await self._advance(item, newest=newest)
        if life is Life.FINISHING:
            await self._finish(evaluations, newest if len(newest) == len(policies) else {})
        elif not self.context.recipe.trains and evaluation.finals_complete(evaluations, newest=newest):
            await self.store.runs.advance(self.context.run_id, Life.FINISHING)  # it takes no step

    async def _plan(
        self, newest: Mapping[str, int], evaluations: Sequence[StoredEvaluation], life: Life
    ) -> bool:
        """Plan the pass that is due; returns whether there is a new one."""
        settings = self.context.recipe.dataflow.evaluation
        plan: evaluation.Plan | None = evaluation.plan_final(newest, settings=settings)
        if life is not Life.FINISHING and self.context.recipe.trains:
            plan = evaluation.plan_periodic(newest, evaluations, settings=settings)
            is_due = plan is not None
            asked = evaluation.next_request(newest, evaluations, is_periodic_due=is_due)
            if asked is not None:
                return await self._open(asked)
        if plan is None or not plan.versions:
            return False
        is_new = await self.store.evaluations.plan(
            self.context.run_id,
            plan.evaluation_id,
            versions=plan.versions,
            planned=plan.planned,
            samples_per_task=plan.samples_per_task,
            final=plan.final,
        )
        if is_new:
            log.info(
                "evaluation.planned",
                versions=dict(plan.versions),
                num_samples=plan.planned,
                final=plan.final,
            )
        return is_new

    async def _open(self, asked: StoredEvaluation) -> bool:
        """Open the pass that somebody asked for; returns False while another is open."""
        opened = await self.store.evaluations.open_requested(
            self.context.run_id, asked.evaluation_id, policies=self.context.trained_policies
        )
        if opened:
            log.info("evaluation.opened", evaluation_id=asked.evaluation_id, num_samples=asked.planned)
        return opened

    async def _advance(self, item: StoredEvaluation, *, newest: Mapping[str, int]) -> None:
        now_s, finished = self.clock.monotonic_s(), item.done + item.failed
        progress = self._progress.setdefault(item.evaluation_id, _Progress(finished=finished, since_s=now_s))
        if progress.finished != finished:
            progress.finished, progress.since_s = finished, now_s
        if progress.held_since_s is None and evaluation.is_superseded(item, newest=newest):
            progress.held_since_s = now_s
        if evaluation.must_give_up(
            item,
            newest=newest,
            idle_s=now_s - progress.since_s,
            held_s=now_s - (progress.held_since_s or now_s),
            patience_s=self.patience_s,
        ):
            log.warning(
                "evaluation.given_up",
                versions=dict(item.versions),
                reason="superseded",
                num_samples=item.done,
                num_planned=item.planned,
                newest=dict(newest),
            )
            await self.store.evaluations.give_up(self.context.run_id, item.evaluation_id, reason="superseded")
            return
        try:
            await self.curation.feed_evaluation(self.context, item)
        except PluginError as error:
            self._report_plugin(error)

    async def _finish(self, evaluations: Sequence[StoredEvaluation], newest: Mapping[str, int]) -> None:
        """Close what is open, and end the run when the final evaluation is in; without versions there is none."""
        run_id = self.context.run_id
        while await self.store.tasks.close_training(run_id, limit=_SWEEP_LIMIT) == _SWEEP_LIMIT:
            pass
        await self.settling.settle_left_behind(self.context, least_age_s=0.0)
        for item in evaluations:
            if item.state in ("waiting", "open") and not (item.final and newest):
                await self.store.evaluations.give_up(run_id, item.evaluation_id, reason="run_finished")
        if not newest or evaluation.finals_complete(evaluations, newest=newest):
            log.info("run.finished", run_id=run_id)
            await self.store.runs.advance(run_id, Life.FINISHED)
