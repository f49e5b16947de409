"""What a data set yields as a message is what a workflow gets."""

import pytest

from astraflow.chat import message_from_proto, message_to_proto
from astraflow.plugins import Message, ToolCall
from astraflow.rollout.v1 import task_pb2


@pytest.mark.parametrize(
    "message",
    [
        Message("user", "Wie viel ist 3 + 4?"),
        Message("assistant", "", tool_calls=(ToolCall("c1", "add", '{"a": 3}'), ToolCall("c2", "say", ""))),
        Message("tool", "7", tool_call_id="c1", name="add"),
    ],
)
def test_a_message_survives_the_contract(message: Message) -> None:
    sent = message_to_proto(message).SerializeToString()
    assert message_from_proto(task_pb2.Message.FromString(sent)) == message
