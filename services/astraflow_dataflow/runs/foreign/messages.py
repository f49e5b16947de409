"""What plug-ins are asked about, as parts of a frame: groups, ready groups, tasks, steps, and entries of a state.

Invariant: a plug-in sees in the process what it would see in the server: messages of the contract where those are
given, and tasks whose data is decoded when somebody looks. Used by `proxies` and `worker`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

from astraflow.dataflow.v1 import batch_pb2
from astraflow.plugins import (
    Group,
    MeasuredStep,
    MeasuredTrajectory,
    ReadyGroup,
    StepRequest,
    TaskSpec,
    TrajectorySummary,
)
from astraflow.rollout.v1 import trajectory_pb2
from astraflow_dataflow.rules.tasks import task_message, task_spec
from astraflow_dataflow.runs.foreign.frames import Frame

if TYPE_CHECKING:
    from google.protobuf.message import Message


def tasks_frame(tasks: Sequence[TaskSpec], **head: Any) -> Frame:
    """Tasks. Raises PluginError for one whose data is not JSON."""
    return Frame(head, [task_message(task).SerializeToString() for task in tasks])


def tasks_of(frame: Frame) -> list[TaskSpec]:
    """What `tasks_frame` wrote."""
    return [task_spec(part) for part in frame.parts]


def group_frame(group: Group, **head: Any) -> Frame:
    """A group."""
    names = {"policy": group.policy, "role": group.role, "group_id": group.group_id, "verdict": group.verdict}
    headers = cast("Sequence[Message]", group.trajectories)
    task = task_message(group.task).SerializeToString()
    return Frame({**head, "group": names}, [task, *(header.SerializeToString() for header in headers)])


def group_of(frame: Frame) -> Group:
    """What `group_frame` wrote."""
    task, *headers = frame.parts
    read = tuple(map(trajectory_pb2.TrajectoryHeader.FromString, headers))
    return Group(
        task=task_spec(task),
        trajectories=cast("tuple[TrajectorySummary, ...]", read),
        **frame.head["group"],
    )


def candidates_frame(groups: Sequence[ReadyGroup], request: StepRequest, **head: Any) -> Frame:
    """Ready groups and what a step needs."""
    fields = [[group.group_id, group.arrival, group.task_id, group.role, group.source] for group in groups]
    items = [
        batch_pb2.Batch(items=cast("Sequence[batch_pb2.BatchItem]", group.trajectories)).SerializeToString()
        for group in groups
    ]
    return Frame({**head, "groups": fields, "request": asdict(request)}, items)


def candidates_of(frame: Frame) -> tuple[list[ReadyGroup], StepRequest]:
    """What `candidates_frame` wrote."""
    groups = [
        ReadyGroup(
            group_id=group_id,
            arrival=arrival,
            task_id=task_id,
            role=role,
            source=source,
            trajectories=cast("tuple[TrajectorySummary, ...]", tuple(batch_pb2.Batch.FromString(part).items)),
        )
        for (group_id, arrival, task_id, role, source), part in zip(
            frame.head["groups"], frame.parts, strict=True
        )
    ]
    return groups, StepRequest(**frame.head["request"])


def step_frame(step: MeasuredStep, **head: Any) -> Frame:
    """What was measured in a step."""
    return Frame({**head, "step": asdict(step)})


def step_of(frame: Frame) -> MeasuredStep:
    """What `step_frame` wrote."""
    fields = frame.head["step"]
    measured = [MeasuredTrajectory(**trajectory) for trajectory in fields.pop("trajectories")]
    return MeasuredStep(**fields, trajectories=measured)


def with_entries(frame: Frame, name: str, entries: Mapping[str, bytes]) -> Frame:
    """The frame with entries of a state behind its parts."""
    return Frame({**frame.head, name: list(entries)}, [*frame.parts, *entries.values()])


def split_entries(frame: Frame, name: str) -> tuple[Frame, dict[str, bytes]]:
    """What `with_entries` was given. Raises ValueError where it was not."""
    keys = frame.head[name]
    first = len(frame.parts) - len(keys)
    return Frame(frame.head, frame.parts[:first]), dict(zip(keys, frame.parts[first:], strict=True))
