"""Chat messages between plug-ins and the contract.

Invariant: a message survives the way there and back unchanged. Used by the dataflow server, which stores what data sets
yield, and by nodes, which hand it to workflows.
"""

from __future__ import annotations

from astraflow.plugins import Message, ToolCall
from astraflow.rollout.v1 import task_pb2

__all__ = ["message_from_proto", "message_to_proto"]


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
