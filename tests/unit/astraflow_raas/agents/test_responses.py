"""Responses are chats otherwise told: items continue a conversation, events say what the whole says."""

from typing import Any

import openai
import pytest

from support.agents import ScriptedPolicy, opened, trained_text, whole_text

CALL = 'See.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def calling(prompt: str) -> str:
    return "it is 3" if "<tool>" in prompt else CALL


async def test_items_that_are_handed_back_continue_the_conversation() -> None:
    tools: Any = [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}]
    async with opened(ScriptedPolicy(calling)) as (calls, client):
        asked: dict[str, Any] = {"model": "solver", "instructions": "brief", "tools": tools}
        first = await client.responses.create(input="1 + 2?", **asked)
        items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "1 + 2?"}]}, *first.output]
        items.append({"type": "function_call_output", "call_id": first.output[1].call_id, "output": "3"})  # type: ignore[union-attr]
        async with client.responses.stream(input=items, **asked) as stream:
            second = await stream.get_final_response()
        (trajectory,) = calls.episode(reward=1.0).trajectories
    assert (first.output_text, first.output[1].type, second.output_text) == (
        "See.",
        "function_call",
        "it is 3",
    )
    assert whole_text(trajectory).startswith("<tool add>¶<system>brief¶<user>1 + 2?¶")
    assert trained_text(trajectory) == [f"{CALL}¶", "it is 3¶"]
    assert second.usage is not None
    assert second.usage.output_tokens == len("it is 3¶")


async def test_an_answer_that_is_cut_is_incomplete() -> None:
    async with opened(ScriptedPolicy(lambda _: "long answer")) as (_calls, client):
        answer = await client.responses.create(model="solver", input="go", max_output_tokens=4)
    assert (answer.status, answer.output_text) == ("incomplete", "long")


async def test_what_would_need_a_memory_is_refused() -> None:
    async with opened(ScriptedPolicy(calling)) as (_calls, client):
        with pytest.raises(openai.BadRequestError, match="unsupported field 'previous_response_id'"):
            await client.responses.create(model="solver", input="go", previous_response_id="resp_1")
