"""Groups that were judged, as `settle` and `commit_whole` of the functions take them.

Pure. A task is judged once it is complete, or beforehand where one commit brings all of it. Called by the store of
episodes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from astraflow.dataflow.v1.batch_pb2 import BatchItem
from astraflow_dataflow.records import CompleteTask
from astraflow_dataflow.rules.groups import was_judged
from astraflow_dataflow.store.episodes.pushes import PushedEpisode, lines_of
from astraflow_dataflow.store.replies import as_ms, flag
from astraflow_dataflow.store.writing import Argument

DeadlineOf: TypeAlias = Callable[[str, Sequence[BatchItem]], int]


@dataclass(frozen=True, kw_only=True)
class JudgedTask:
    """A task with what becomes of each of its groups, in their order."""

    task: CompleteTask
    verdicts: Sequence[str]
    episodes: Sequence[PushedEpisode] = ()
    """All of it, where it was judged before they are committed."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Tasks whose groups were judged, and how."""

    tasks: Sequence[JudgedTask]
    deadline_of: DeadlineOf
    """Of a policy and items the version that their group counts as sampled with."""
    tombstone_s: float
    """How long the answers to repeated pushes of a settled task are kept."""
    switch: int = 0
    """Number of the switch whose plug-ins judged."""


def settle_arguments(judged: Judged) -> Iterator[Argument]:
    """Yield what `settle` takes."""
    yield from (as_ms(judged.tombstone_s), judged.switch)
    yield "\n".join(one.task.task_id for one in judged.tasks)
    for one in judged.tasks:
        yield from _groups(one, judged.deadline_of)


def whole_arguments(judged: Judged) -> Iterator[Argument]:
    """Yield what `commit_whole` takes behind where payloads are."""
    yield judged.switch
    for one in judged.tasks:
        (first, _), lines = one.episodes[0], lines_of(one.episodes)
        yield from (one.task.task_id, first.attempt, first.node_id)
        yield from (f"{lines.tool_calls},{lines.tool_errors}", lines.who, lines.traces)
        yield len(one.verdicts)
        yield from _groups(one, judged.deadline_of)


def _groups(judged: JudgedTask, deadline_of: DeadlineOf) -> Iterator[Argument]:
    """What the functions take of each group of a task."""
    for group, batch, verdict in zip(judged.task.groups, judged.task.items, judged.verdicts, strict=True):
        items = batch.items
        yield from (judged.task.task_id, group.group_id, group.policy, verdict)
        yield from (flag(was_judged(verdict)), len(items), deadline_of(group.policy, items))
        yield from (repr(sum(item.reward for item in items)), batch.SerializeToString())
        yield "\n".join(item.trajectory_id for item in items)
