"""Settling: a complete task's groups become ready or are dropped, exactly once.

The filters run here, between two atomic calls: reading the members and `settle`, which does nothing when
another server was first. A crash in between leaves the task listed as unsettled, and the run loop of any
server settles it. Called by ingest and by the run loop.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from astraflow.dataflow.v1.trajectory_service_pb2 import PushResult
from astraflow.plugins import Group
from astraflow.rollout.v1.trajectory_pb2 import Episode
from astraflow_dataflow.records import CompleteTask
from astraflow_dataflow.rules.groups import Rules, complete_task, judge, placed_headers
from astraflow_dataflow.rules.staleness import deadline_version
from astraflow_dataflow.runs.data_plugins import with_states
from astraflow_dataflow.runs.leased import LeasedTask, WholeTask
from astraflow_dataflow.runs.registry import RunContext, RunRegistry
from astraflow_dataflow.store.episodes.commits import Pushed
from astraflow_dataflow.store.episodes.judged import Judged, JudgedTask
from astraflow_dataflow.store.episodes.pushes import has_repeats
from astraflow_dataflow.store.store import Store
from astraflow_kit.log import bind, get_logger
from astraflow_kit.metrics import Metrics
from astraflow_kit.unit_of_work import task_correlation

log = get_logger(__name__)

TOMBSTONE_S = 86_400.0
"""How long the answers to repeated pushes of a settled task are kept."""
_LEFT_BEHIND_S = 1.0
_AT_ONCE = 16
"""Tasks of one call, which holds Redis for a millisecond or two."""


@dataclass(frozen=True)
class Settling:
    """Judges complete tasks."""

    store: Store
    registry: RunRegistry
    metrics: Metrics

    async def settle(self, context: RunContext, tasks: Sequence[CompleteTask]) -> int:
        """Settle complete tasks. Returns how many of them another server had not settled before."""
        settled = 0
        for first in range(0, len(tasks), _AT_ONCE):
            settled += await self._settle(context, tasks[first : first + _AT_ONCE])
        return settled

    async def _settle(self, context: RunContext, tasks: Sequence[CompleteTask]) -> int:
        settled = None
        while settled is None:
            rules, filters, switch = context.rules, context.plugins.filters, context.switch

            async def work(rules: Rules = rules) -> list[JudgedTask]:
                return await self._judged(
                    context, lambda: [JudgedTask(task=task, verdicts=judge(task, rules)) for task in tasks]
                )

            judged = await with_states(self.store.plugin_states, context.run_id, filters, work)
            settled = await self.store.episodes.settle(
                context.run_id, _as_judged(context, judged, switch=switch)
            )
            if settled is None:
                await self.registry.refresh_plugins(context)
        for one in judged:
            if one.task.task_id in settled:
                self._tell(context, one)
        return len(settled)

    async def _judged(self, context: RunContext, work: Callable[[], list[JudgedTask]]) -> list[JudgedTask]:
        """What filters of this release judge is not worth a thread; others may hang."""
        if context.plugins.is_foreign("filter"):
            return await context.plugins.in_thread("filter", work)
        return work()

    async def commit_whole(
        self, context: RunContext, tasks: Sequence[WholeTask]
    ) -> Mapping[str, Sequence[Pushed]]:
        """Commit and settle tasks of which all has come, in one call.

        Returns what became of the episodes of each by task; those of others are to be committed. Filters that keep
        states are asked once a task is complete: what they keep must not change twice. So are foreign ones, for which
        no push waits.
        """
        episodes = [episode for _, own in tasks for episode in own]
        if has_repeats(episodes) or not context.is_made or context.plugins.is_foreign("filter"):
            return {}
        if any(plugin.state is not None for plugin in context.plugins.filters):
            return {}
        judged = [_judged_whole(own, leased, context.rules) for leased, own in tasks]
        pushed = await self.store.episodes.commit_whole(
            context.run_id, _as_judged(context, judged, switch=context.switch)
        )
        for one in judged:
            if isinstance(pushed.get(one.task.task_id, [None])[0], PushResult):
                self._tell(context, one)
        return pushed

    def _tell(self, context: RunContext, judged: JudgedTask) -> None:
        task, verdicts = judged.task, judged.verdicts
        bind(correlation_id=task_correlation(task.task_id), task_id=task.task_id)
        closed = "early" if task.why else "whole"
        for group, verdict in zip(task.groups, verdicts, strict=True):
            context.lengths.note(group.task.source, [item.num_tokens for item in group.trajectories])
            said = {"policy": group.policy, "verdict": verdict}
            self.metrics.increment("astraflow_dataflow_groups_total", 1, **said)
            tokens = (trajectory.num_trainable_tokens for trajectory in group.trajectories)
            self.metrics.observe("astraflow_dataflow_response_tokens", *tokens, closed=closed, **said)
            log.info("group.settled", task_id=task.task_id, group_id=group.group_id, verdict=verdict)
        inform_curators(context, task.groups, verdicts)

    async def settle_left_behind(self, context: RunContext, *, least_age_s: float = _LEFT_BEHIND_S) -> int:
        """Settle all tasks that whoever completed them did not, in slices. Returns how many."""
        settled, is_full = 0, context.is_made
        while is_full:
            left = await self.store.episodes.unsettled(
                context.run_id, least_age_s=least_age_s, limit=_AT_ONCE
            )
            tasks = await self.store.episodes.complete_tasks(context.run_id, left) if left else []
            fresh = await self.settle(context, tasks)
            settled += fresh
            is_full = len(left) == _AT_ONCE and fresh > 0
        return settled


def _judged_whole(episodes: Sequence[Episode], leased: LeasedTask, rules: Rules) -> JudgedTask:
    """A task that these episodes are all of, as it is once they are committed."""
    headers = [list(placed_headers(episode)) for episode in episodes]
    task = complete_task(
        episodes[0].task_id,
        spec=leased.spec,
        headers=chain.from_iterable(headers),
        group_size=leased.group_size,
        num_finished=leased.group_size,
    )
    return JudgedTask(
        task=task, verdicts=judge(task, rules), episodes=list(zip(episodes, headers, strict=True))
    )


def _as_judged(context: RunContext, tasks: Sequence[JudgedTask], *, switch: int) -> Judged:
    return Judged(
        tasks=tasks,
        deadline_of=lambda policy_id, items: deadline_version(
            items, context.recipe.policy(policy_id).batches
        ),
        tombstone_s=TOMBSTONE_S,
        switch=switch,
    )


def inform_curators(context: RunContext, groups: Sequence[Group], verdicts: Sequence[str]) -> None:
    """Let curators observe groups some time; when too many wait already, never."""
    plugins = context.plugins
    for group, verdict in zip(groups if plugins.curators else (), verdicts, strict=False):
        try:
            plugins.unobserved.put_nowait(replace(group, verdict=verdict))
        except asyncio.QueueFull:
            slow = TimeoutError(
                f"{plugins.unobserved.maxsize} groups wait for `observe`; others are not observed"
            )
            plugins.faults.note("curator", plugins.curators[0].name, slow)
