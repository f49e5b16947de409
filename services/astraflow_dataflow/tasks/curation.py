"""Curation: the data set is asked for tasks only as far as admission gives credit.

The cursor lives in Redis and moves by compare-and-set together with the tasks it stands for, so a restart
neither skips nor repeats a task and two servers feed one run without harm. Called by the run loop; the data
set plug-in runs in a thread.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from functools import partial, wraps

from astraflow._contract.rpcs import bounds_of
from astraflow.chat import message_to_proto
from astraflow.errors import PluginError
from astraflow.plugins import Curator, Dataset, TaskSpec
from astraflow.rollout.v1 import task_pb2
from astraflow_dataflow.records import StoredEvaluation, Supply
from astraflow_dataflow.rules import evaluation
from astraflow_dataflow.rules.faults import PluginFaults
from astraflow_dataflow.rules.scores import task_line
from astraflow_dataflow.rules.tasks import task_problem
from astraflow_dataflow.runs.data_plugins import DataPlugin, with_states
from astraflow_dataflow.runs.registry import RunContext
from astraflow_dataflow.store.store import Store
from astraflow_kit.log import get_logger
from astraflow_kit.plugins import RAISED, describe

log = get_logger(__name__)

_MAX_PRIORITY = int(bounds_of(task_pb2.Task, "priority").max)
TASKS_PER_FEED = 64
FEEDS_PER_CALL = 16
"""Draws at once, so that curators that skip everything hold up nothing else."""
HELD_OUT_AHEAD = 1024
"""Samples of held-out tasks queued beyond those that are done, up to the end of the last one's task."""


@dataclass(frozen=True)
class Curation:
    """Feeds lanes from data sets."""

    store: Store

    async def feed_training(self, context: RunContext) -> Supply:
        """Queue training tasks until they cover the credit; return the figures found first. Raises PluginError."""
        first = supply = await self.store.tasks.supply(context.run_id)
        train = training_tasks(context.plugins.dataset)
        for draws in range(FEEDS_PER_CALL):
            missing = missing_tasks(supply)
            if missing <= 0:
                break
            # Each draw is larger than the one before, for curators may skip most of it.
            count = min(TASKS_PER_FEED, missing << draws)
            with context.plugins.faults.running("dataset", context.recipe.run.data_name):
                drawn, ended = await asyncio.to_thread(draw, train, start=supply.cursor, count=count)
            specs = context.lengths.longest_first(await self._proposed(context, drawn))
            context.skipped = 0 if specs else context.skipped + len(drawn)
            flow = context.recipe.dataflow
            tasks = [
                new_task(spec, purpose=task_pb2.PURPOSE_TRAINING, group_size=flow.group_size)
                for spec in specs
            ]
            added, left_out = await self.store.tasks.feed(
                context.run_id,
                expected_cursor=supply.cursor,
                next_cursor=supply.cursor + len(drawn),
                exhausted=ended,
                tasks=tasks,
            )
            if left_out:
                raise PluginError(
                    f"the data set's {_name_of(train)} gave task id {left_out[0]!r}, which another task of the run "
                    f"has: {len(left_out)} tasks are left out; give each an id of its own"
                )
            if tasks and not added:
                raise PluginError(
                    f"the data set's {_name_of(train)} gave task id {tasks[0].task_id!r} again; every index needs an "
                    "id of its own, also when a task comes a second time"
                )
            supply = await self.store.tasks.supply(context.run_id)
        return first

    async def _proposed(self, context: RunContext, drawn: Sequence[TaskSpec]) -> Sequence[TaskSpec]:
        """What the curators leave of drawn tasks, each asked about what those before it left."""
        chosen = drawn
        for curator in context.plugins.curators:
            work = partial(asyncio.to_thread, propose, curator, chosen, context.plugins.faults)
            wanted = await with_states(self.store.plugin_states, context.run_id, [curator], work)
            if curator.shadow:
                skipped = len(chosen) - len(wanted)
                counts = {"asked": len(chosen), "differs": skipped, "refused": skipped}
                context.plugins.shadows.note("curator", curator.name, **counts)
            else:
                chosen = wanted
        return chosen

    async def feed_evaluation(self, context: RunContext, planned: StoredEvaluation) -> None:
        """Queue held-out tasks of an evaluation, not too far ahead of what is done. Raises PluginError."""
        each, finished = planned.samples_per_task, planned.done + planned.failed
        # All samples of a task are queued together, so that an engine computes its prompt once.
        count = -(-(min(planned.planned, finished + HELD_OUT_AHEAD) - planned.fed) // each)
        if count <= 0:
            return
        first = planned.fed // each
        drawn, ended = await self._held_out(context, planned, start=first, count=count)
        tasks = [
            _sample(task, task_id=evaluation.task_id(planned.task_stem, sample))
            for index, task in enumerate(drawn, start=first)
            for sample in range(index * each, (index + 1) * each)
        ]
        lines = [
            task_line(index, task_id=task.task_id, source=task.source)
            for index, task in enumerate(drawn, start=first)
        ]
        await self.store.evaluations.feed(
            context.run_id,
            planned.evaluation_id,
            expected_fed=planned.fed,
            planned=planned.fed + len(tasks) if ended else planned.planned,
            tasks=tasks,
            journal="".join(lines),
        )

    async def _held_out(
        self, context: RunContext, planned: StoredEvaluation, *, start: int, count: int
    ) -> tuple[list[task_pb2.Task], bool]:
        """The tasks of a pass from one on, and whether there are no more. Raises PluginError."""
        if planned.has_own_tasks:
            own = await self.store.evaluations.own_tasks(
                context.run_id, planned.evaluation_id, start=start, count=count
            )
            return own, len(own) < count
        heldout = context.plugins.dataset.heldout
        specs, ended = await asyncio.to_thread(draw, heldout, start=start, count=count)
        purpose = task_pb2.PURPOSE_EVALUATION
        return [new_task(spec, purpose=purpose, group_size=1) for spec in specs], ended


def missing_tasks(supply: Supply) -> int:
    """Return how many tasks must be queued so that nothing but admission bounds leasing."""
    if supply.exhausted or not supply.active:
        return 0
    return max(0, supply.credit - supply.queued)


def training_tasks(dataset: Dataset) -> Callable[[int], TaskSpec | None]:
    """Return the data set's `train`, ended where its length, if it has one, says."""

    @wraps(dataset.train)
    def train(index: int) -> TaskSpec | None:
        ended = isinstance(dataset, Sized) and index >= len(dataset)
        return None if ended else dataset.train(index)

    return train


def propose(
    curator: DataPlugin[Curator], tasks: Sequence[TaskSpec], faults: PluginFaults
) -> Sequence[TaskSpec]:
    """Return the tasks a curator wants, in its order; all of them when it raises or answers something else."""
    given = {task.task_id: task for task in tasks}
    try:
        with faults.timed("curator", curator.name):
            chosen: object = curator.made.propose(tuple(tasks))
        if not isinstance(chosen, Sequence) or not all(isinstance(task, TaskSpec) for task in chosen):
            raise TypeError(f"`propose` returned {type(chosen).__name__}, not a sequence of tasks")
        names = [task.task_id for task in chosen]
        if len(set(names) & given.keys()) != len(names):
            raise ValueError(f"`propose` returned tasks that were not drawn, or one twice: {names[:5]}")
    except RAISED as error:  # a plug-in must not stop the run
        log.exception("curator.failed", curator=curator.name, task_ids=list(given)[:5])
        faults.note("curator", curator.name, error)
        return tasks
    return [given[name] for name in names]


def draw(source: Callable[[int], TaskSpec | None], *, start: int, count: int) -> tuple[list[TaskSpec], bool]:
    """Return (tasks from index `start`, whether the data set ended). Raises PluginError when the plug-in does."""
    specs: list[TaskSpec] = []
    for index in range(start, start + count):
        try:
            spec: object = source(index)
            if not isinstance(spec, TaskSpec | None):
                raise TypeError(f"it returned {type(spec).__name__}, not a TaskSpec or None")
        except RAISED as error:
            if specs:  # they are good work; the next draw begins at the fault
                return specs, False
            raise PluginError(
                f"the data set's {_name_of(source)} raised at index {index}: {describe(error)}; mend it, "
                "it is asked again at each sweep"
            ) from error
        if spec is None:
            return specs, True
        specs.append(spec)
    return specs, False


def new_task(spec: TaskSpec, *, purpose: task_pb2.Purpose.ValueType, group_size: int) -> task_pb2.Task:
    """Return the contract's form of a data set's task. Raises PluginError when it breaks the contract's bounds."""
    if not 0 <= spec.priority <= _MAX_PRIORITY:
        raise PluginError(
            f"the data set's task {spec.task_id!r} has priority {spec.priority}; give it one of 0 to {_MAX_PRIORITY}"
        )
    message = task_pb2.Task(
        task_id=spec.task_id,
        messages=map(message_to_proto, spec.messages),
        data_json=_json(spec),
        purpose=purpose,
        group_size=group_size,
        source=spec.source,
        priority=spec.priority,
    )
    problem = task_problem(message, allow_evaluation=purpose == task_pb2.PURPOSE_EVALUATION)
    if problem:
        raise PluginError(f"the data set's task {spec.task_id!r} cannot be used: {problem}")
    return message


def _sample(task: task_pb2.Task, *, task_id: str) -> task_pb2.Task:
    sample = task_pb2.Task()
    sample.CopyFrom(task)
    sample.task_id, sample.group_size, sample.purpose = task_id, 1, task_pb2.PURPOSE_EVALUATION
    return sample


def _name_of(source: Callable[[int], TaskSpec | None]) -> str:
    """`module.Class.method`, as its author would look for it."""
    return f"{getattr(source, '__module__', '')}.{getattr(source, '__qualname__', repr(source))}"


def _json(spec: TaskSpec) -> bytes:
    try:
        return json.dumps(dict(spec.data), separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise PluginError(
            f"the data of task {spec.task_id!r} is not JSON: {error}; use plain numbers, strings, lists and mappings"
        ) from error
