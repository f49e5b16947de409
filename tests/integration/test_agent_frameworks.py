"""Two agent frameworks from PyPI, unchanged, work with the endpoint, and what they ask becomes one trajectory each."""

from typing import Any

import pytest
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from support.agents import ScriptedPolicy, opened, trained_text, whole_text

pytestmark = pytest.mark.integration
CALL = '<tool_call>{"name": "add", "arguments": {"a": 19, "b": 23}}</tool_call>'


def solver(prompt: str) -> str:
    """Calls the tool, then says what it answered."""
    _asked, tool, result = prompt.rpartition("<tool>")
    return f"The sum is {result.partition('¶')[0]}." if tool else CALL


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.mark.parametrize("route", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
async def test_the_openai_agents_sdk_trains_unchanged(route: Any) -> None:
    set_tracing_disabled(disabled=True)  # it would send traces to OpenAI
    policy = ScriptedPolicy(solver)
    async with opened(policy) as (calls, client):
        model = route(model="solver", openai_client=client)
        agent = Agent(name="adder", instructions="Use the tool.", tools=[function_tool(add)], model=model)
        answer = await Runner.run(agent, "19 + 23?")
        streamed = Runner.run_streamed(agent, "23 + 19?")
        async for _event in streamed.stream_events():
            pass
        trajectories = calls.episode(reward=1.0).trajectories
    assert answer.final_output == streamed.final_output == "The sum is 42."
    assert [trained_text(trajectory) for trajectory in trajectories] == [[f"{CALL}¶", "The sum is 42.¶"]] * 2
    assert whole_text(trajectories[0]).startswith("<tool add>¶<system>Use the tool.¶<user>19 + 23?¶")


async def test_pydantic_ai_trains_unchanged() -> None:
    policy = ScriptedPolicy(solver)
    async with opened(policy) as (calls, client):
        model = OpenAIChatModel("solver", provider=OpenAIProvider(openai_client=client))
        agent: Any = PydanticAgent(model, instructions="Use the tool.", tools=[add])
        answer = await agent.run("19 + 23?")
        async with agent.run_stream("23 + 19?") as stream:
            streamed = await stream.get_output()
        trajectories = calls.episode(reward=1.0).trajectories
    assert answer.output == streamed == "The sum is 42."
    assert [trained_text(trajectory) for trajectory in trajectories] == [[f"{CALL}¶", "The sum is 42.¶"]] * 2
