"""Chat messages, tasks and observations between plug-ins and the contract.

Invariant: each survives the way there and back unchanged; an observation that was let pass keeps the contract's bounds.
Used by the dataflow server, which stores what data sets yield, by nodes, which hand it to workflows, and by the
environment service.
"""

import json
import math
from collections.abc import Iterable

from astraflow.plugins import Message, Observation, TaskSpec, Tool, ToolCall
from astraflow.raas.v1 import environment_service_pb2 as contract
from astraflow.rollout.v1 import task_pb2

__all__ = [
    "check_observation",
    "message_from_proto",
    "message_to_proto",
    "observation_from_proto",
    "observation_to_proto",
    "task_from_proto",
    "task_to_proto",
    "tools_to_proto",
]

MAX_MESSAGES, MAX_TEXT_BYTES, MAX_METRICS, MAX_TOOLS = 64, 2**20, 64, 128
_ROLES = ("system", "user", "tool")


def message_to_proto(message: Message) -> task_pb2.Message:
    """Return the contract's form."""
    return task_pb2.Message(
        role=message.role,
        content=message.content,
        tool_calls=[
            task_pb2.ToolCall(id=call.id, name=call.name, arguments_json=call.arguments.encode())
            for call in message.tool_calls
        ],
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def message_from_proto(message: task_pb2.Message) -> Message:
    """Return the form that plug-ins see."""
    return Message(
        role=message.role,
        content=message.content,
        tool_calls=tuple(
            ToolCall(call.id, call.name, call.arguments_json.decode()) for call in message.tool_calls
        ),
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def check_observation(seen: object) -> Observation:
    """Return it. Raises ValueError with the value, the bound and the remedy."""
    if not isinstance(seen, Observation):
        raise ValueError(f"it returned {type(seen).__name__} instead of an Observation")
    if len(seen.messages) > MAX_MESSAGES:
        raise ValueError(
            f"an observation has {len(seen.messages)} messages, at most {MAX_MESSAGES}; join them"
        )
    if len(seen.tools) > MAX_TOOLS:
        raise ValueError(f"an observation has {len(seen.tools)} tools, at most {MAX_TOOLS}; offer fewer")
    texts = [message.content for message in seen.messages]
    texts += [text for tool in seen.tools for text in (tool.name, tool.description, tool.parameters)]
    num_bytes = sum(len(text.encode()) for text in texts)
    if num_bytes > MAX_TEXT_BYTES:
        raise ValueError(f"an observation has {num_bytes} bytes of text, at most {MAX_TEXT_BYTES}; show less")
    roles = {message.role for message in seen.messages} - set(_ROLES)
    if roles:
        raise ValueError(f"an observation speaks as {sorted(roles)}; it may as {', '.join(_ROLES)}")
    if not math.isfinite(seen.reward):
        raise ValueError(f"reward {seen.reward} is not finite")
    bad = [name for name, value in seen.metrics.items() if not math.isfinite(value)]
    if bad or len(seen.metrics) > MAX_METRICS:
        raise ValueError(f"{len(seen.metrics)} metrics, at most {MAX_METRICS}, and finite (not so: {bad})")
    return seen


def observation_to_proto(seen: object) -> contract.Observation:
    """Return the contract's form. Raises ValueError as `check_observation`."""
    checked = check_observation(seen)
    return contract.Observation(
        messages=map(message_to_proto, checked.messages),
        reward=checked.reward,
        terminated=checked.done,
        metrics=checked.metrics,
    )


def observation_from_proto(seen: contract.Observation, tools: Iterable[contract.Tool] = ()) -> Observation:
    """Return the form that plug-ins see. Raises ValueError as `check_observation`: services need not be ours."""
    return check_observation(
        Observation(
            messages=tuple(map(message_from_proto, seen.messages)),
            reward=seen.reward,
            done=seen.terminated or seen.truncated,
            metrics=dict(seen.metrics),
            tools=tuple(
                Tool(tool.name, tool.description, tool.arguments_schema_json.decode()) for tool in tools
            ),
        )
    )


def tools_to_proto(tools: Iterable[Tool]) -> list[contract.Tool]:
    """Return the contract's form."""
    return [
        contract.Tool(
            name=tool.name, description=tool.description, arguments_schema_json=tool.parameters.encode()
        )
        for tool in tools
    ]


def task_to_proto(task: TaskSpec) -> task_pb2.Task:
    """Return the contract's form of what an environment starts from."""
    return task_pb2.Task(
        task_id=task.task_id,
        messages=map(message_to_proto, task.messages),
        data_json=json.dumps(dict(task.data)).encode(),
        source=task.source,
    )


def task_from_proto(task: task_pb2.Task) -> TaskSpec:
    """Return the form that plug-ins see. Raises ValueError for data that is no JSON object."""
    try:
        data = json.loads(task.data_json) if task.data_json else {}
    except ValueError as error:
        raise ValueError(f"task {task.task_id}: data_json is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"task {task.task_id}: data_json is {type(data).__name__}, expected an object")
    messages = tuple(map(message_from_proto, task.messages))
    return TaskSpec(task.task_id, messages, data, source=task.source, priority=task.priority)
