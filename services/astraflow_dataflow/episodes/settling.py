"""Settling: a complete task's groups become ready or are dropped, exactly once.

The filters run here, between two atomic calls: reading the members and `settle`, which does nothing when
another server was first. A crash in between leaves the task listed as unsettled, and the run loop of any
server settles it. Called by ingest and by the run loop.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from astraflow.plugins import Group
from astraflow_dataflow.records import CompleteTask
from astraflow_dataflow.rules.groups import Rules, judge
from astraflow_dataflow.rules.staleness import deadline_version
from astraflow_dataflow.runs.data_plugins import with_states
from astraflow_dataflow.runs.registry import RunContext, RunRegistry
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

            async def work(rules: Rules = rules) -> list[tuple[CompleteTask, list[str]]]:
                return [(task, judge(task, rules)) for task in tasks]

            judged = await with_states(self.store.plugin_states, context.run_id, filters, work)
            settled = await self.store.episodes.settle(
                context.run_id,
                judged,
                deadline_of=lambda policy_id, items: deadline_version(
                    items, context.recipe.policy(policy_id).batches
                ),
                tombstone_s=TOMBSTONE_S,
                switch=switch,
            )
            if settled is None:
                await self.registry.refresh_plugins(context)
        for task, verdicts in judged:
            if task.task_id in settled:
                self._tell(context, task, verdicts)
        return len(settled)

    def _tell(self, context: RunContext, task: CompleteTask, verdicts: Sequence[str]) -> None:
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
        settled, is_full = 0, True
        while is_full:
            left = await self.store.episodes.unsettled(
                context.run_id, least_age_s=least_age_s, limit=_AT_ONCE
            )
            tasks = await self.store.episodes.complete_tasks(context.run_id, left) if left else []
            fresh = await self.settle(context, tasks)
            settled += fresh
            is_full = len(left) == _AT_ONCE and fresh > 0
        return settled


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
