"""Selecting: which ready groups a step takes, when the recipe names a selector.

Redis offers the ready groups, the selector chooses in a thread, and the binding call takes its choice whole or, when
another server bound one of them meanwhile, offers again. A selector that fails chooses nothing: the step takes the
groups whose deadline is nearest. Called by binding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

from astraflow.dataflow.v1 import batch_pb2
from astraflow.errors import UnavailableError
from astraflow.plugins import ReadyGroup, Selector, StepRequest, TrajectorySummary
from astraflow_dataflow.records import Selection
from astraflow_dataflow.rules.faults import PluginFaults
from astraflow_dataflow.runs.data_plugins import DataPlugin, with_states
from astraflow_dataflow.runs.registry import RunContext
from astraflow_dataflow.store.store import Store
from astraflow_kit.log import get_logger
from astraflow_kit.plugins import RAISED

log = get_logger(__name__)


async def selection(
    store: Store,
    context: RunContext,
    selector: DataPlugin[Selector],
    *,
    groups: Sequence[ReadyGroup],
    request: StepRequest,
) -> Selection | None:
    """Return what the selector makes of ready groups; None when it failed."""
    plugins = context.plugins
    work = partial(plugins.in_thread, "selector", partial(choose, selector, groups, request, plugins.faults))
    return await with_states(store.plugin_states, context.run_id, [selector], work)


def choose(
    selector: DataPlugin[Selector],
    candidates: Sequence[ReadyGroup],
    request: StepRequest,
    faults: PluginFaults,
) -> Selection | None:
    """Ask the selector; None when it raises or answers something else than ready groups or nothing."""
    try:
        with faults.timed("selector", selector.name):
            answer = selector.made.select(candidates, request)
        chosen = _group_ids(answer, candidates, num_groups=request.num_groups)
    except UnavailableError:
        raise
    except RAISED as error:  # a plug-in must not stop the run
        log.exception("selector.failed", selector=selector.name, policy_id=request.policy, step=request.step)
        faults.note("selector", selector.name, error)
        return None
    return Selection(mode="take", chosen=chosen) if chosen else Selection(mode="wait")


def ready_group(group_id: str, score: float, items: bytes) -> ReadyGroup:
    """Return a stored group as selectors see it."""
    stored = batch_pb2.Batch.FromString(items).items
    return ReadyGroup(
        group_id=group_id,
        arrival=int(score) % 2**32,
        task_id=stored[0].task_id,
        role=stored[0].role,
        source=stored[0].source,
        trajectories=cast("tuple[TrajectorySummary, ...]", tuple(stored)),
    )


def _group_ids(answer: object, candidates: Sequence[ReadyGroup], *, num_groups: int) -> tuple[str, ...]:
    """Return what a selector answered. Raises TypeError, ValueError when it is not a choice."""
    if not isinstance(answer, Sequence) or isinstance(answer, str):
        raise TypeError(f"it returned {type(answer).__name__}, not a sequence of group ids")
    chosen = tuple(map(str, answer))
    unknown = set(chosen) - {candidate.group_id for candidate in candidates}
    if unknown:
        raise ValueError(f"it chose {sorted(unknown)[0][:200]!r}, which is no candidate")
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"it chose {len(chosen) - len(set(chosen))} groups twice")
    if chosen and len(chosen) != num_groups:
        raise ValueError(
            f"it chose {len(chosen)} groups, the step takes {num_groups}; choose so many, or none to wait"
        )
    return chosen
