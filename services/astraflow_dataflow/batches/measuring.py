"""Measuring: what a trainer found of the trajectories of a step reaches the filters that learn from it.

It comes with the acknowledgement of the step and is kept in the state of these filters alone, so it is repeated with an
acknowledgement whose answer was lost. Called by binding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from astraflow.dataflow.v1 import batch_pb2
from astraflow.errors import InvalidArgumentError, UnavailableError
from astraflow.plugins import Filter, MeasuredStep, MeasuredTrajectory, Measuring
from astraflow_dataflow.runs.data_plugins import DataPlugin, with_states
from astraflow_dataflow.runs.registry import RunContext
from astraflow_dataflow.store.store import Store
from astraflow_kit.log import get_logger
from astraflow_kit.plugins import RAISED

log = get_logger(__name__)


def measured_step(batch: batch_pb2.Batch, mismatch_kl: Sequence[float]) -> MeasuredStep:
    """Return what was measured of the new trajectories of a batch. Raises InvalidArgumentError for another number of
    values than it has items.
    """
    if len(mismatch_kl) not in (0, len(batch.items)):
        raise InvalidArgumentError(
            f"mismatch_kl has {len(mismatch_kl)} values, batch {batch.batch_id} has {len(batch.items)} items; give one "
            "for each item, -1 where nothing was measured, or none at all"
        )
    trajectories = [
        MeasuredTrajectory(
            mismatch_kl=value, node_id=item.node_id, source=item.source, version=item.max_version
        )
        for item, value in zip(batch.items, mismatch_kl, strict=False)
        if value >= 0 and not item.use
    ]
    return MeasuredStep(policy=batch.policy_id, step=batch.step, trajectories=trajectories)


async def inform_filters(store: Store, context: RunContext, step: MeasuredStep) -> None:
    """Let the filters that learn from it do so; one that raises is named as any that does. Raises UnavailableError."""
    learning = [plugin for plugin in context.plugins.filters if isinstance(plugin.made, Measuring)]
    if not learning or not step.trajectories:
        return

    async def work() -> None:
        for plugin in learning:
            await context.plugins.in_thread("filter", partial(_inform, context, plugin, step))

    await with_states(store.plugin_states, context.run_id, learning, work)


def _inform(context: RunContext, plugin: DataPlugin[Filter], step: MeasuredStep) -> None:
    faults = context.plugins.faults
    try:
        with faults.timed("filter", plugin.name):
            plugin.made.measured(step)  # type: ignore[attr-defined]  # a Measuring
    except UnavailableError:
        raise
    except RAISED as error:  # a plug-in must not stop the run
        log.exception("filter.failed", filter=plugin.name, policy_id=step.policy, step=step.step)
        faults.note("filter", plugin.name, error)
