"""Curation: the data set is asked for tasks only as far as admission gives credit.

The cursor lives in Redis and moves by compare-and-set together with the tasks it stands for, so a restart
neither skips nor repeats a task and two servers feed one run without harm. Called by the run loop; the data
set plug-in runs in a thread.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass

from astraflow.errors import PluginError
from astraflow.plugins import TaskSpec
from astraflow.rollout.v1 import task_pb2
from astraflow_dataflow.records import NewTask, StoredEvaluation, Supply
from astraflow_dataflow.rules import evaluation
from astraflow_dataflow.rules.tasks import task_problem
from astraflow_dataflow.runs.registry import RunContext
from astraflow_dataflow.store.store import Store

TASKS_PER_FEED = 64
HELD_OUT_AHEAD = 1024
"""Held-out tasks queued beyond those that are done."""


@dataclass(frozen=True)
class Curation:
    """Feeds lanes from data sets."""

    store: Store

    async def feed_training(self, context: RunContext) -> Supply:
        """Queue training tasks until they cover the credit; return the figures found first. Raises PluginError."""
        first = supply = await self.store.tasks.supply(context.run_id)
        while missing_tasks(supply) > 0:
            count = min(TASKS_PER_FEED, missing_tasks(supply))
            specs, ended = await asyncio.to_thread(
                draw, context.dataset.train, start=supply.cursor, count=count
            )
            flow = context.recipe.dataflow
            tasks = [
                new_task(spec, purpose=task_pb2.PURPOSE_TRAINING, group_size=flow.group_size)
                for spec in specs
            ]
            await self.store.tasks.feed(
                context.run_id,
                expected_cursor=supply.cursor,
                next_cursor=supply.cursor + len(specs),
                exhausted=ended,
                tasks=tasks,
            )
            supply = await self.store.tasks.supply(context.run_id)
        return first

    async def feed_evaluation(self, context: RunContext, planned: StoredEvaluation) -> None:
        """Queue held-out tasks of an evaluation, not too far ahead of what is done. Raises PluginError."""
        finished = planned.done + planned.failed
        count = min(planned.planned, finished + HELD_OUT_AHEAD) - planned.fed
        if count <= 0:
            return
        specs, ended = await asyncio.to_thread(draw, context.dataset.heldout, start=planned.fed, count=count)
        tasks = [
            new_task(
                spec,
                purpose=task_pb2.PURPOSE_EVALUATION,
                group_size=1,
                task_id=evaluation.task_id(planned.evaluation_id, planned.fed + offset),
            )
            for offset, spec in enumerate(specs)
        ]
        total = planned.fed + len(specs) if ended else planned.planned
        await self.store.evaluations.feed(
            context.run_id, planned.evaluation_id, expected_fed=planned.fed, planned=total, tasks=tasks
        )


def missing_tasks(supply: Supply) -> int:
    """Return how many tasks must be queued so that nothing but admission bounds leasing."""
    if supply.exhausted or not supply.active:
        return 0
    return max(0, supply.credit - supply.queued)


def draw(source: Callable[[int], TaskSpec | None], *, start: int, count: int) -> tuple[list[TaskSpec], bool]:
    """Return (tasks from index `start`, whether the data set ended). Raises PluginError when the plug-in does."""
    specs: list[TaskSpec] = []
    for index in range(start, start + count):
        try:
            spec = source(index)
        except Exception as error:
            if specs:  # they are good work; the next draw begins at the fault
                return specs, False
            raise PluginError(
                f"the data set's {_name_of(source)} raised at index {index}: {type(error).__name__}: {error}; mend it, "
                "it is asked again at each sweep"
            ) from error
        if spec is None:
            return specs, True
        specs.append(spec)
    return specs, False


def new_task(
    spec: TaskSpec, *, purpose: task_pb2.Purpose.ValueType, group_size: int, task_id: str = ""
) -> NewTask:
    """Return the stored form of a data set's task. Raises PluginError when it breaks the contract's bounds."""
    message = task_pb2.Task(
        task_id=task_id or spec.task_id,
        messages=[task_pb2.Message(role=message.role, content=message.content) for message in spec.messages],
        data_json=_json(spec),
        purpose=purpose,
        group_size=group_size,
        source=spec.source,
    )
    problem = task_problem(message, allow_evaluation=bool(task_id))
    if problem:
        raise PluginError(f"the data set's task {spec.task_id!r} cannot be used: {problem}")
    return NewTask(task_id=message.task_id, group_size=group_size, spec=message.SerializeToString())


def _name_of(source: Callable[[int], TaskSpec | None]) -> str:
    """`module.Class.method`, as its author would look for it."""
    return f"{getattr(source, '__module__', '')}.{getattr(source, '__qualname__', repr(source))}"


def _json(spec: TaskSpec) -> bytes:
    try:
        return json.dumps(dict(spec.data), separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise PluginError(
            f"the data of task {spec.task_id!r} is not JSON: {error}; use plain numbers, strings, lists and mappings"
        ) from error
