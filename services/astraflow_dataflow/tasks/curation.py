"""Curation: the data set is asked for tasks only as far as admission gives credit.

The cursor lives in Redis and moves by compare-and-set together with the tasks it stands for, so a restart
neither skips nor repeats a task and two servers feed one run without harm. Called by the run loop; the data
set plug-in runs in a thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from astraflow._contract.rpcs import bounds_of
from astraflow.errors import PluginError, UnavailableError
from astraflow.plugins import Curator, Dataset, TaskSpec
from astraflow.rollout.v1 import task_pb2
from astraflow_dataflow.records import StoredEvaluation, Supply
from astraflow_dataflow.rules import evaluation
from astraflow_dataflow.rules.faults import PluginFaults
from astraflow_dataflow.rules.scores import task_line
from astraflow_dataflow.rules.tasks import task_message, task_problem
from astraflow_dataflow.runs.data_plugins import DataPlugin, with_states
from astraflow_dataflow.runs.drawing import draw, name_of, training_tasks
from astraflow_dataflow.runs.foreign.proxies import ForeignDataset
from astraflow_dataflow.runs.registry import RunContext
from astraflow_dataflow.store.store import Store
from astraflow_kit.log import get_logger
from astraflow_kit.plugins import RAISED

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
        for draws in range(FEEDS_PER_CALL):
            missing = missing_tasks(supply)
            if missing <= 0:
                break
            # Each draw is larger than the one before, for curators may skip most of it.
            count = min(TASKS_PER_FEED, missing << draws)
            drawn, ended = await self._drawn(context, "train", start=supply.cursor, count=count)
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
            source = _name_of(context.plugins.dataset)
            if left_out:
                raise PluginError(
                    f"the data set's {source} gave task id {left_out[0]!r}, which another task of the run "
                    f"has: {len(left_out)} tasks are left out; give each an id of its own"
                )
            if tasks and not added:
                raise PluginError(
                    f"the data set's {source} gave task id {tasks[0].task_id!r} again; every index needs an id of its "
                    "own, also when a task comes a second time"
                )
            supply = await self.store.tasks.supply(context.run_id)
        return first

    async def _drawn(
        self, context: RunContext, method: str, *, start: int, count: int
    ) -> tuple[list[TaskSpec], bool]:
        """At most so many tasks, and whether the data set ended. Raises PluginError, UnavailableError."""
        plugins, dataset = context.plugins, context.plugins.dataset
        with plugins.faults.running("dataset", context.recipe.run.data_name):
            if isinstance(dataset, ForeignDataset):
                work = partial(dataset.draw, method, start=start, count=count)
            else:
                source = training_tasks(dataset) if method == "train" else dataset.heldout
                work = partial(draw, source, start=start, count=count)
            return await plugins.in_thread("dataset", work)

    async def _proposed(self, context: RunContext, drawn: Sequence[TaskSpec]) -> Sequence[TaskSpec]:
        """What the curators leave of drawn tasks, each asked about what those before it left."""
        chosen = drawn
        for curator in context.plugins.curators:
            work = partial(
                context.plugins.in_thread,
                "curator",
                partial(propose, curator, chosen, context.plugins.faults),
            )
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
        specs, ended = await self._drawn(context, "heldout", start=start, count=count)
        purpose = task_pb2.PURPOSE_EVALUATION
        return [new_task(spec, purpose=purpose, group_size=1) for spec in specs], ended


def missing_tasks(supply: Supply) -> int:
    """Return how many tasks must be queued so that nothing but admission bounds leasing."""
    if supply.exhausted or not supply.active:
        return 0
    return max(0, supply.credit - supply.queued)


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
    except UnavailableError:
        raise
    except RAISED as error:  # a plug-in must not stop the run
        log.exception("curator.failed", curator=curator.name, task_ids=list(given)[:5])
        faults.note("curator", curator.name, error)
        return tasks
    return [given[name] for name in names]


def new_task(spec: TaskSpec, *, purpose: task_pb2.Purpose.ValueType, group_size: int) -> task_pb2.Task:
    """Return the contract's form of a data set's task. Raises PluginError when it breaks the contract's bounds."""
    if not 0 <= spec.priority <= _MAX_PRIORITY:
        raise PluginError(
            f"the data set's task {spec.task_id!r} has priority {spec.priority}; give it one of 0 to {_MAX_PRIORITY}"
        )
    message = task_message(spec)
    message.purpose, message.group_size = purpose, group_size
    problem = task_problem(message, allow_evaluation=purpose == task_pb2.PURPOSE_EVALUATION)
    if problem:
        raise PluginError(f"the data set's task {spec.task_id!r} cannot be used: {problem}")
    return message


def _sample(task: task_pb2.Task, *, task_id: str) -> task_pb2.Task:
    sample = task_pb2.Task()
    sample.CopyFrom(task)
    sample.task_id, sample.group_size, sample.purpose = task_id, 1, task_pb2.PURPOSE_EVALUATION
    return sample


def _name_of(dataset: Dataset) -> str:
    return dataset.name_of("train") if isinstance(dataset, ForeignDataset) else name_of(dataset.train)
