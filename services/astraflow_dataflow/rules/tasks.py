"""What a task must be before it may enter a lane, whoever submits it.

Pure; called by curation and by the task service.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

from pydantic_core import from_json

from astraflow._contract.bounds import require_bounds
from astraflow._contract.rpcs import bounds_of
from astraflow.chat import message_from_proto, message_to_proto
from astraflow.errors import InvalidArgumentError, PluginError
from astraflow.plugins import TaskSpec
from astraflow.rollout.v1 import task_pb2
from astraflow_dataflow.rules.evaluation import TASK_PREFIX, is_evaluation_task

RESERVED_PREFIXES = ("train-", "heldout-", TASK_PREFIX)
"""Ids of the data set and of evaluations begin like this; nobody else may submit such a task."""
_SHOWN = 128
MAX_PROMPT_BYTES = bounds_of(task_pb2.Message, "content").max_bytes


def task_problem(task: task_pb2.Task, *, allow_evaluation: bool = False) -> str | None:
    """Return why a task cannot be used, or None. Only the server itself submits evaluation tasks."""
    try:
        require_bounds(task)
    except InvalidArgumentError as error:
        return f"task {task.task_id[:_SHOWN]}: {error.message}"
    if not allow_evaluation and (
        is_evaluation_task(task.task_id) or task.purpose == task_pb2.PURPOSE_EVALUATION
    ):
        return f"task {task.task_id}: evaluation tasks are planned by the server from the recipe; submit training tasks"
    return _content_problem(task)


def reserved_problem(task_id: str, sources: Iterable[str]) -> str | None:
    """Return why nobody may submit a task of this id, or None; `sources` are the run's, whose names begin their ids."""
    reserved = (*RESERVED_PREFIXES, *(f"{name}:" for name in sources))
    if not task_id.startswith(reserved):
        return None
    return (
        f"task {task_id[:_SHOWN]}: ids that begin with {', '.join(reserved)} are reserved for the run's data set and "
        "evaluations; submit it under another, such as `mine-17`"
    )


def task_spec(stored: bytes) -> TaskSpec:
    """Return a stored task as plug-ins see it; `data` is decoded when somebody looks."""
    task = task_pb2.Task.FromString(stored)
    messages = tuple(map(message_from_proto, task.messages))
    data = _JsonObject(task.data_json)
    return TaskSpec(task.task_id, messages, data, source=task.source, priority=task.priority)


def task_message(spec: TaskSpec) -> task_pb2.Task:
    """Return the contract's form of a task as plug-ins see it. Raises PluginError for data that is not JSON."""
    return task_pb2.Task(
        task_id=spec.task_id,
        messages=map(message_to_proto, spec.messages),
        data_json=_encoded(spec),
        source=spec.source,
        priority=spec.priority,
    )


def _encoded(spec: TaskSpec) -> bytes:
    if isinstance(spec.data, _JsonObject):
        return spec.data.encoded
    try:
        return json.dumps(dict(spec.data), separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise PluginError(
            f"the data of task {spec.task_id!r} is not JSON: {error}; use plain numbers, strings, lists and mappings"
        ) from error


class _JsonObject(Mapping[str, object]):
    def __init__(self, encoded: bytes) -> None:
        self.encoded = encoded

    @cached_property
    def _decoded(self) -> dict[str, object]:
        decoded: dict[str, object] = json.loads(self.encoded) if self.encoded else {}
        return decoded

    def __getitem__(self, key: str) -> object:
        return self._decoded[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._decoded)

    def __len__(self) -> int:
        return len(self._decoded)


def _content_problem(task: task_pb2.Task) -> str | None:
    prompt_bytes = sum(len(message.content.encode()) for message in task.messages)
    prompt_bytes += sum(len(call.arguments_json) for message in task.messages for call in message.tool_calls)
    if prompt_bytes > MAX_PROMPT_BYTES:
        return f"task {task.task_id}: {prompt_bytes} bytes of messages, at most {MAX_PROMPT_BYTES}"
    if not task.data_json:
        return None
    try:
        data = from_json(
            task.data_json, allow_inf_nan=False
        )  # refuses more than 200 levels before it builds them
        json.dumps(data, allow_nan=False)  # a number may be too large for a double
    except ValueError as error:
        return f"task {task.task_id}: data_json is not JSON with finite numbers: {error}"
    return None if isinstance(data, dict) else f"task {task.task_id}: data_json must be a JSON object"
