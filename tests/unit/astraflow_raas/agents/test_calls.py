"""Calls become trajectories: which continue one another, which stay apart, and what is trained on."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import openai
import pytest

from astraflow.agents import AgentLimits
from astraflow.errors import RecipeError
from astraflow.plugins import Trajectory
from astraflow_raas.agents.calls import AgentFlooded
from astraflow_raas.engine.base import EngineFaulty
from support.agents import ScriptedPolicy, opened, serving_agents, trained_text, user, whole_text

Chat = list[Mapping[str, Any]]


def counting(prompt: str) -> str:
    """A different answer at each turn."""
    return f"answer {prompt.count('<assistant>')}"


async def said(client: openai.AsyncOpenAI, messages: Chat, model: str = "solver", **options: Any) -> Chat:
    """The messages, and the answer as a client would hand it back."""
    answer = await client.chat.completions.create(model=model, messages=messages, **options)  # type: ignore[arg-type]
    return [*messages, answer.choices[0].message.model_dump()]


async def test_calls_that_extend_one_another_are_one_trajectory() -> None:
    async with opened(ScriptedPolicy(counting)) as (calls, client):
        chat = await said(client, [{"role": "system", "content": "be brief"}, user("one")])
        chat = await said(client, [*chat, user("two")])
        await said(client, [*chat, {"role": "tool", "content": "42", "tool_call_id": "c"}, user("three")])
        (trajectory,) = calls.episode(reward=0.5).trajectories
    assert whole_text(trajectory) == (
        "<system>be brief¶<user>one¶<assistant>answer 1¶<user>two¶<assistant>answer 2¶"
        "<tool>42¶<user>three¶<assistant>answer 3¶"
    )
    assert trained_text(trajectory) == ["answer 1¶", "answer 2¶", "answer 3¶"]
    assert [span.role for span in trajectory.turn_spans] == ["user", "assistant"] * 3
    check(trajectory)
    assert trajectory.reward == 0.5


@pytest.mark.parametrize(
    "altered",
    [
        {"content": "answer 1 "},
        {"content": "Answer 1"},
        {"content": "answer 1", "name": "someone"},
    ],
)
async def test_an_altered_answer_begins_another_trajectory(altered: Mapping[str, str]) -> None:
    async with opened(ScriptedPolicy(counting)) as (calls, client):
        await said(client, [user("one")])
        await said(client, [user("one"), {"role": "assistant", **altered}, user("two")])
        first, second = calls.episode(reward=1.0).trajectories
    assert trained_text(first) == ["answer 1¶"]
    assert trained_text(second) == ["answer 2¶"]


async def test_a_truncated_history_begins_another_trajectory() -> None:
    async with opened(ScriptedPolicy(counting)) as (calls, client):
        chat = await said(client, [user("one")])
        chat = await said(client, [*chat, user("two")])
        await said(client, [*chat[2:], user("three")])
        texts = [whole_text(trajectory) for trajectory in calls.episode(reward=1.0).trajectories]
    assert texts[1] == "<user>two¶<assistant>answer 2¶<user>three¶<assistant>answer 2¶"
    assert len(texts) == 2


async def test_branches_share_tokens_and_each_is_trained_once() -> None:
    async with opened(ScriptedPolicy(counting)) as (calls, client):
        root = await said(client, [user("one")])
        await asyncio.gather(said(client, [*root, user("left")]), said(client, [*root, user("right")]))
        first, second = calls.episode(reward=1.0).trajectories
    assert {text.split("<user>")[-1][:4] for text in map(whole_text, (first, second))} == {"left", "righ"}
    assert trained_text(first) == ["answer 1¶", "answer 2¶"]
    assert trained_text(second) == ["answer 2¶"]
    check(first)
    check(second)


async def test_siblings_are_a_trajectory_each_and_one_may_go_on() -> None:
    async with opened(ScriptedPolicy(counting)) as (calls, client):
        chat = await said(client, [user("one")], n=3)
        await said(client, [*chat, user("two")])
        lengths = [trajectory.loss_mask.count(True) for trajectory in calls.episode(reward=1.0).trajectories]  # type: ignore[attr-defined]
    assert sorted(lengths) == [9, 9, 18]


async def test_models_and_sub_agents_stay_apart() -> None:
    policies = ScriptedPolicy(counting), ScriptedPolicy(counting, name="critic")
    async with opened(*policies) as (calls, client):
        chat = await said(client, [user("one")])
        await said(client, [*chat, user("two")], model="critic")
        await said(client, [user("sub-task")])
        trajectories = calls.episode(reward=1.0).trajectories
    assert [trajectory.policy for trajectory in trajectories] == ["solver", "critic", "solver"]


async def test_a_policy_under_another_name_plays_that_role() -> None:
    async with serving_agents() as endpoint, endpoint.open({"judge": ScriptedPolicy(counting)}) as calls:
        async with openai.AsyncOpenAI(base_url=calls.base_url, api_key=calls.api_key) as client:
            await said(client, [user("one")], model="judge")
        (trajectory,) = calls.episode(reward=1.0).trajectories
    assert (trajectory.policy, trajectory.role) == ("solver", "judge")


async def test_an_answer_cut_by_its_length_is_ended_before_it_goes_on() -> None:
    async with opened(ScriptedPolicy(counting)) as (calls, client):
        chat = await said(client, [user("one")], max_tokens=4)
        await said(client, [*chat, user("two")])
        (trajectory,) = calls.episode(reward=1.0).trajectories
    assert whole_text(trajectory) == "<user>one¶<assistant>answ¶<user>two¶<assistant>answer 2¶"
    assert trained_text(trajectory) == ["answ", "answer 2¶"]


async def test_a_template_that_cannot_continue_makes_a_trajectory_of_each_call() -> None:
    class Rewrites(ScriptedPolicy):
        def extend(self, token_ids: object, messages: object, *, tools: object = ()) -> list[int]:
            raise RecipeError("the template rewrites what stands before")

    async with opened(Rewrites(counting)) as (calls, client):
        chat = await said(client, [user("one")])
        await said(client, [*chat, user("two")])
        assert len(calls.episode(reward=1.0).trajectories) == 2


async def test_text_parts_and_developer_turns_are_what_templates_know() -> None:
    policy = ScriptedPolicy(counting)
    parts = [{"type": "text", "text": "on"}, {"type": "text", "text": "e"}]
    async with opened(policy) as (_calls, client):
        await said(client, [{"role": "developer", "content": "brief"}, {"role": "user", "content": parts}])
    assert policy.prompts == ["<system>brief¶<user>one¶<assistant>"]


def texts(prompt: str) -> str:
    """An answer to plain text, with what a stop cuts away."""
    return f"[{len(prompt)}] Observation: made up"


async def test_a_text_that_extends_another_continues_it() -> None:
    async with opened(ScriptedPolicy(texts)) as (calls, client):
        prompt = "Think."
        for _ in range(2):
            answer = await client.completions.create(
                model="solver", prompt=prompt, stop=["Observation:"], logprobs=0
            )
            assert answer.choices[0].finish_reason == "stop"
            prompt += f"{answer.choices[0].text}Observation: 42. "
        stream = await client.completions.create(model="solver", prompt="Else.", stream=True, max_tokens=5)
        assert [part.choices[0].text async for part in stream] == ["[5] O"]
        first, second = calls.episode(reward=1.0).trajectories
    assert trained_text(first) == ["[6] Observation:", "[27] Observation:"]
    assert whole_text(first) == "Think.[6] Observation: 42. [27] Observation:"
    assert whole_text(second) == "Else.[5] O"
    check(first)


async def test_a_text_after_the_policys_own_end_begins_another_trajectory() -> None:
    async with opened(ScriptedPolicy(lambda _: "Done.")) as (calls, client):
        await client.completions.create(model="solver", prompt="Think.")
        await client.completions.create(model="solver", prompt="Think.Done. More.")
        assert len(calls.episode(reward=1.0).trajectories) == 2


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def calling(prompt: str) -> str:
    """A call first, then an answer."""
    return "it is 3" if "<tool>" in prompt else f"Let me see.{CALL}"


async def test_a_loop_of_tool_calls_is_one_trajectory() -> None:
    async with opened(ScriptedPolicy(calling)) as (calls, client):
        chat = await said(client, [user("1 + 2?")], tools=[ADD])
        (call,) = chat[-1]["tool_calls"]
        # Clients write arguments anew.
        call["function"]["arguments"] = '{"b":[2],"a":1}'
        result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
        chat = await said(client, [*chat, result], tools=[ADD])
        (trajectory,) = calls.episode(reward=1.0).trajectories
    assert (chat[1]["content"], chat[-1]["content"]) == ("Let me see.", "it is 3")
    assert trained_text(trajectory) == [f"Let me see.{CALL}¶", "it is 3¶"]
    assert whole_text(trajectory).startswith("<tool add>¶<user>1 + 2?¶")


async def test_other_tools_begin_another_trajectory() -> None:
    other = {"type": "function", "function": {"name": "mul"}}
    async with opened(ScriptedPolicy(counting)) as (calls, client):
        chat = await said(client, [user("one")], tools=[ADD])
        await said(client, [*chat, user("two")], tools=[other])
        assert len(calls.episode(reward=1.0).trajectories) == 2


async def test_calls_are_text_to_an_agent_that_wants_none() -> None:
    async with opened(ScriptedPolicy(calling)) as (_calls, client):
        plain = await said(client, [user("1 + 2?")])
        refused = await said(client, [user("1 + 2?")], tools=[ADD], tool_choice="none")
    assert plain[-1]["content"] == refused[-1]["content"] == f"Let me see.{CALL}"
    assert not plain[-1]["tool_calls"]


async def test_the_newest_answer_is_the_episodes() -> None:
    async with opened(ScriptedPolicy(counting)) as (calls, client):
        assert calls.answer == ""
        chat = await said(client, [user("one")])
        await said(client, [*chat, user("two")])
        assert calls.answer == "answer 2"


async def test_an_episode_holds_no_more_conversations_than_the_contract_takes() -> None:
    async with opened(ScriptedPolicy(counting)) as (calls, client):
        for number in range(2):
            await said(client, [user(f"{number}")], n=32)
        with pytest.raises(openai.RateLimitError, match="may have 64 conversations"):
            await said(client, [user("one more")])
        assert len(calls.episode(reward=1.0).trajectories) == 64


async def test_an_engine_fault_ends_the_episode_with_that_fault() -> None:
    async def episode() -> None:
        policy = ScriptedPolicy(counting, fault=EngineFaulty("NaN log-probs"))
        async with opened(policy) as (_calls, client):
            with pytest.raises(openai.InternalServerError, match="the policy cannot answer"):
                await said(client, [user("one")])
            await asyncio.Event().wait()

    with pytest.raises(EngineFaulty, match="NaN log-probs"):
        await episode()


async def test_an_agent_that_floods_ends_the_episode() -> None:
    async def episode() -> None:
        async with opened(ScriptedPolicy(counting), limits=AgentLimits(max_calls=1)) as (_calls, client):
            while True:
                with suppress(openai.RateLimitError):
                    await said(client, [user("more")])

    with pytest.raises(AgentFlooded, match="was refused 2 calls: an episode may have 1 calls"):
        await episode()


def check(trajectory: Trajectory) -> None:
    """Every column is as long as the tokens, and log-probs stand exactly where tokens are trained on."""
    assert len(trajectory.token_ids) == len(trajectory.loss_mask) == len(trajectory.logprobs)
    assert [logprob < 0 for logprob in trajectory.logprobs] == list(trajectory.loss_mask)
    trained = [index for index, chosen in enumerate(trajectory.loss_mask) if chosen]
    spans = trajectory.version_spans
    assert all(any(span.start <= index < span.end for span in spans) for index in trained)
