"""What the real `openai` client meets: answers, refusals in OpenAI's shape, keys, bounds."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import httpx
import openai
import pytest

from astraflow.agents import AgentLimits
from astraflow_bench.traces import Collector
from astraflow_kit import traces
from astraflow_kit.metrics import Metrics
from astraflow_raas.engine.base import EngineRefused
from support.agents import ScriptedPolicy, client_of, opened, serving_agents, trained_text, user, whole_text
from support.otlp import named, traced
from support.scripted_dataflow import eventually


def echo(prompt: str) -> str:
    """What the last message said."""
    return prompt.rpartition("¶<assistant>")[0].rpartition(">")[2].upper()


async def test_a_completion_says_what_was_sampled_and_what_it_cost() -> None:
    async with opened(ScriptedPolicy(echo)) as (_calls, client):
        answer = await client.chat.completions.create(model="solver", messages=[user("sum")], logprobs=True)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("SUM", "stop")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len("<user>sum¶<assistant>"), 4)
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [(token.token, token.logprob) for token in choice.logprobs.content[:2]] == [
        ("S", -0.5),
        ("U", -0.5),
    ]


async def test_a_stream_says_the_same_as_the_whole_answer() -> None:
    async with opened(ScriptedPolicy(echo)) as (calls, client):
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        stream = await client.chat.completions.create(model="solver", messages=[user("sum")], n=2, **options)
        chunks = [chunk async for chunk in stream]
        episode = calls.episode(reward=1.0)
    parts = [(choice.index, choice.delta.content) for chunk in chunks for choice in chunk.choices]
    assert [part for part in parts if part[1]] == [(0, "SUM"), (1, "SUM")]
    ends = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert ends == [None, "stop", None, "stop"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    assert len(episode.trajectories) == 2


async def test_a_streamed_tool_call_is_the_whole_one() -> None:
    said = 'So:<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    tool: Any = {"type": "function", "function": {"name": "add"}}
    async with opened(ScriptedPolicy(lambda _: said)) as (_calls, client):
        asked: dict[str, Any] = {"model": "solver", "messages": [user("sum")], "tools": [tool]}
        whole = (await client.chat.completions.create(**asked)).choices[0]
        async with client.chat.completions.stream(**asked) as stream:
            streamed = (await stream.get_final_completion()).choices[0]
    for choice in (whole, streamed):
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "So:")
        (call,) = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')


async def test_a_choice_of_tools_is_not_forced() -> None:
    tool: Any = {"type": "function", "function": {"name": "add"}}
    async with opened(ScriptedPolicy(echo)) as (_calls, client):
        answer = await client.chat.completions.with_raw_response.create(
            model="solver", messages=[user("hi")], tools=[tool], tool_choice="required"
        )
    assert answer.headers["x-astraflow-ignored"] == "tool_choice"
    assert answer.parse().choices[0].message.content == "HI"


async def test_an_answer_ends_before_a_stop_and_its_tokens_with_it() -> None:
    long = "x" * 100 + "Observation: made up"
    async with opened(ScriptedPolicy(lambda _: long)) as (calls, client):
        answer = await client.chat.completions.create(
            model="solver", messages=[user("act")], stop=["\nHuman", "Observation:"]
        )
        (trajectory,) = calls.episode(reward=1.0).trajectories
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("x" * 100, "stop")
    assert whole_text(trajectory).endswith("xObservation:")
    assert [(span.start, span.end) for span in trajectory.version_spans][-1][1] == len(trajectory.token_ids)


@pytest.mark.parametrize("asked", [5, 10_000])
async def test_a_length_is_what_was_asked_but_at_most_the_recipes(asked: int) -> None:
    async with opened(ScriptedPolicy(lambda _: "y" * 500)) as (_calls, client):
        answer = await client.chat.completions.create(
            model="solver", messages=[user("go")], max_completion_tokens=asked
        )
    assert answer.choices[0].message.content == "y" * min(asked, 200)
    assert answer.choices[0].finish_reason == "length"


async def test_models_are_the_policies_of_the_episode() -> None:
    async with opened(ScriptedPolicy(echo), ScriptedPolicy(echo, name="critic")) as (_calls, client):
        assert [model.id async for model in client.models.list()] == ["solver", "critic"]
        with pytest.raises(openai.NotFoundError, match="no model 'gpt-4'; this episode has solver, critic"):
            await client.chat.completions.create(model="gpt-4", messages=[user("hi")])


async def test_what_the_recipe_decides_is_ignored_by_name() -> None:
    async with opened(ScriptedPolicy(echo)) as (_calls, client):
        answer = await client.chat.completions.with_raw_response.create(
            model="solver", messages=[user("hi")], temperature=0.2, top_p=0.9, user="me"
        )
    assert answer.headers["x-astraflow-ignored"] == "temperature, top_p, user"


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"logit_bias": {"1": 5}}, "unknown or unsupported field 'logit_bias'"),
        ({"response_format": {"type": "json_object"}}, "unsupported field 'response_format'"),
        ({"top_logprobs": 3, "logprobs": True}, "top_logprobs: Input should be 0"),
        ({"n": 0}, "n: Input should be greater than or equal to 1"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content.0.type: .* 'text'"),
        ({"extra_body": {"nonsense": 1}}, "unknown or unsupported field 'nonsense'"),
    ],
)
async def test_a_wrong_request_is_refused_and_costs_nothing(fields: dict[str, Any], complaint: str) -> None:
    async with opened(ScriptedPolicy(echo)) as (calls, client):
        given: dict[str, Any] = {"model": "solver", "messages": [user("hi")]} | fields
        with pytest.raises(openai.BadRequestError, match=complaint) as refused:
            await client.chat.completions.create(**given)
        assert calls.episode(reward=0.0).metrics["agent_calls"] == 0
    assert refused.value.type == "invalid_request_error"


async def test_a_key_opens_its_own_episode_until_that_is_over() -> None:
    async with serving_agents() as endpoint:
        async with endpoint.open({"a": ScriptedPolicy(echo, name="a")}) as first:
            async with endpoint.open({"b": ScriptedPolicy(echo, name="b")}) as second:
                assert first.api_key != second.api_key
                async with client_of(first) as client:
                    assert [model.id async for model in client.models.list()] == ["a"]
            async with client_of(second) as client:
                with pytest.raises(openai.AuthenticationError, match="this key opens no episode") as refused:
                    await client.models.list()
        assert refused.value.code == "invalid_api_key"
        for wrong in ("", "Bearer", "Bearer nonsense", "Basic abc"):
            address, headers = f"{first.base_url}/chat/completions", {"authorization": wrong}
            answer = await asyncio.to_thread(httpx.post, address, content=b"not read", headers=headers)
            assert answer.status_code == 401


async def test_a_wrong_key_is_refused_before_the_body_is_read_and_counted() -> None:
    metrics = Metrics()
    async with serving_agents(metrics) as endpoint, endpoint.open({}) as calls:
        assert len(set(calls.api_key.removeprefix("af-"))) > 16
        assert len(calls.api_key.removeprefix("af-")) * 6 >= 256
        host, _, port = calls.base_url.removeprefix("http://").removesuffix("/v1").partition(":")
        for wrong in ("af-", calls.api_key[:-1], calls.api_key + "a", calls.api_key.swapcase(), "é"):
            reader, writer = await asyncio.open_connection(host, int(port))
            head = f"POST /v1/responses HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {wrong}\r\nContent-Length: 999"
            writer.write(f"{head}\r\n\r\n".encode())  # and no body follows
            assert b" 401 " in await asyncio.wait_for(reader.readline(), 20)
            writer.close()
    assert b"astraflow_raas_agent_keys_refused_total 5.0" in metrics.render()


async def test_what_was_said_in_one_episode_continues_in_no_other() -> None:
    async with serving_agents() as endpoint, AsyncExitStack() as stack:
        victim = await stack.enter_async_context(endpoint.open({"a": ScriptedPolicy(echo, name="a")}))
        attacker = await stack.enter_async_context(endpoint.open({"b": ScriptedPolicy(echo, name="b")}))
        own, other = [await stack.enter_async_context(client_of(each)) for each in (victim, attacker)]
        first = await own.responses.create(model="a", input="secret")
        with pytest.raises(openai.NotFoundError, match="no model 'a'; this episode has b"):
            await other.responses.create(model="a", input="hello")
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await other.responses.create(model="b", input="more", previous_response_id=first.id)
        heard: Any = [user("secret"), {"role": "assistant", "content": first.output_text}, user("more")]
        await other.chat.completions.create(model="b", messages=heard)
        assert (victim.answer, attacker.answer) == ("SECRET", "MORE")
        (victims,), (attackers,) = (
            each.episode(reward=reward).trajectories for each, reward in ((victim, 1.0), (attacker, 0.0))
        )
    assert (victims.policy, trained_text(victims)) == ("a", ["SECRET¶"])
    assert (attackers.policy, trained_text(attackers)) == ("b", ["MORE¶"])


async def test_the_end_of_an_episode_ends_its_calls() -> None:
    policy = ScriptedPolicy(echo)
    policy.may_answer.clear()
    async with serving_agents() as endpoint, AsyncExitStack() as stack:
        async with endpoint.open({"solver": policy}) as calls:
            client = await stack.enter_async_context(client_of(calls))
            call = asyncio.create_task(client.chat.completions.create(model="solver", messages=[user("hi")]))
            await eventually(lambda: policy.prompts, what="the call is sampled")
        with pytest.raises(openai.AuthenticationError):
            await call
    assert policy.num_cancelled == 1
    assert calls.episode(reward=0.0).trajectories == ()


async def test_a_call_that_the_agent_gave_up_is_in_no_trajectory() -> None:
    policy = ScriptedPolicy(echo)
    policy.may_answer.clear()
    async with opened(policy) as (calls, client):
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(model="solver", messages=[user("hi")], timeout=0.5)
        await eventually(lambda: policy.num_cancelled == 1, what="the call is given up")
        assert calls.episode(reward=0.0).trajectories == ()


async def test_a_prompt_that_the_engine_refuses_is_the_agents_to_shorten() -> None:
    policy = ScriptedPolicy(echo, fault=EngineRefused("the prompt has 5000 tokens, the limit is 4096"))
    async with opened(policy) as (_calls, client):
        with pytest.raises(openai.BadRequestError, match="the limit is 4096") as refused:
            await client.chat.completions.create(model="solver", messages=[user("hi")])
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("limits", "complaint"),
    [
        (AgentLimits(max_calls=2), "an episode may have 2 calls"),
        (AgentLimits(max_sampled_tokens=4), "an episode may have 4 sampled tokens"),
    ],
)
async def test_an_episode_has_its_limits(limits: AgentLimits, complaint: str) -> None:
    async with opened(ScriptedPolicy(echo), limits=limits) as (calls, client):
        for _ in range(3):
            try:
                await client.chat.completions.create(model="solver", messages=[user("sum")])
            except openai.RateLimitError as error:
                refused = error
        episode = calls.episode(reward=0.0)
    assert complaint in str(refused)
    assert refused.response.headers["x-should-retry"] == "false"
    assert episode.metrics["agent_calls"] <= 2


async def test_no_more_requests_are_worked_on_than_allowed() -> None:
    policy = ScriptedPolicy(echo)
    policy.may_answer.clear()
    async with opened(policy, limits=AgentLimits(max_concurrent_calls=2)) as (_calls, client):
        calls = [
            asyncio.create_task(client.chat.completions.create(model="solver", messages=[user(f"{i}")]))
            for i in range(5)
        ]
        await eventually(lambda: len(policy.prompts) == 2, what="two calls are sampled")
        policy.may_answer.set()
        answers = await asyncio.gather(*calls)
    assert sorted(answer.choices[0].message.content or "" for answer in answers) == list("01234")


async def test_other_routes_are_refused_in_the_same_shape() -> None:
    async with opened(ScriptedPolicy(echo)) as (_calls, client):
        with pytest.raises(openai.NotFoundError, match="POST /v1/embeddings: Not Found"):
            await client.embeddings.create(model="solver", input="hi")


async def test_a_call_is_recorded_below_its_agent_in_the_trace_of_its_episode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
    with Collector() as collector, traced(monkeypatch, collector):
        with traces.span("episode"):
            here = traces.here()
            assert here is not None
            own = {"traceparent": f"00-{here.trace_id:032x}-{7:016x}-01"}
            async with opened(ScriptedPolicy(echo)) as (_calls, client):
                for headers in (own, other, {"traceparent": "nonsense"}):
                    asked: Any = {"model": "solver", "messages": [user("sum")], "extra_headers": headers}
                    await client.chat.completions.create(**asked)
        traces.end()
        await eventually(lambda: len(collector.received) == 4, what="all spans are received")
    continued, linked, plain = named(collector.received, "POST /v1/chat/completions")
    assert {one.span.trace_id for one in collector.received} == {here.trace_id.to_bytes(16)}
    assert int.from_bytes(continued.parent_span_id) == 7
    assert [link.span_id.hex() for link in linked.links] == ["00f067aa0ba902b7"]
    assert linked.parent_span_id == plain.parent_span_id == here.span_id.to_bytes(8)
    assert not continued.links
    assert not plain.links
