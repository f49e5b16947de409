"""Settling: a complete task's groups become ready or are dropped, exactly once.

The filters run here, between two atomic calls: reading the members and `settle`, which does nothing when
another server was first. A crash in between leaves the task listed as unsettled, and the run loop of any
server settles it. Called by ingest and by the run loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from astraflow.plugins import Group
from astraflow_dataflow.records import CompleteTask
from astraflow_dataflow.rules.groups import judge
from astraflow_dataflow.runs.data_plugins import with_states
from astraflow_dataflow.runs.registry import RunContext
from astraflow_dataflow.store.store import Store
from astraflow_kit.log import get_logger
from astraflow_kit.metrics import Metrics

log = get_logger(__name__)

TOMBSTONE_S = 86_400.0
"""How long the answers to repeated pushes of a settled task are kept."""
_LEFT_BEHIND_S = 1.0
_PER_SWEEP = 64


@dataclass(frozen=True)
class Settling:
    """Judges complete tasks."""

    store: Store
    metrics: Metrics

    async def settle(self, context: RunContext, task: CompleteTask) -> bool:
        """Settle one complete task. Returns False when another server was first."""

        async def work() -> list[str]:
            return judge(task, context.rules)

        filters = context.plugins.filters
        verdicts = await with_states(self.store.plugin_states, context.run_id, filters, work)
        acted = await self.store.episodes.settle(context.run_id, task, verdicts, tombstone_s=TOMBSTONE_S)
        if acted:
            for group, verdict in zip(task.groups, verdicts, strict=True):
                self.metrics.increment(
                    "astraflow_dataflow_groups_total", policy=group.policy, verdict=verdict
                )
                log.info("group.settled", task_id=task.task_id, group_id=group.group_id, verdict=verdict)
            inform_curators(context, task.groups, verdicts)
        return acted

    async def settle_left_behind(self, context: RunContext, *, least_age_s: float = _LEFT_BEHIND_S) -> int:
        """Settle tasks that whoever completed them did not. Returns how many."""
        left = await self.store.episodes.unsettled(context.run_id, least_age_s=least_age_s, limit=_PER_SWEEP)
        for task_id in left:
            task = await self.store.episodes.complete_task(context.run_id, task_id)
            if task is not None:
                await self.settle(context, task)
        return len(left)


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
