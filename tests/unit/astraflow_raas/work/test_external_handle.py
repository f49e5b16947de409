"""A role that an endpoint elsewhere plays: an agent gets its text, and trains nothing with it. Another episode's
endpoint is what is elsewhere here."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from astraflow.plugins import MissingCapability
from astraflow.recipe import ExternalSettings, ResolvedRole
from astraflow_kit.metrics import Metrics
from astraflow_raas.agents.calls import AgentCalls
from astraflow_raas.policies.external_model import ExternalEndpoint, ExternalModel
from astraflow_raas.work.external_handle import ExternalHandle
from support.agents import ScriptedPolicy, client_of, serving_agents, user
from support.raas_parts import SAMPLING

JUDGE = ResolvedRole("judge", "judge", is_trained=False)


@asynccontextmanager
async def external(elsewhere: AgentCalls | None) -> AsyncIterator[ExternalHandle]:
    """The judge, asked at another episode's endpoint; on a node without that it has none."""
    endpoint = ExternalEndpoint(base_url=elsewhere.base_url, key=elsewhere.api_key) if elsewhere else None
    model = ExternalModel("judge", ExternalSettings(model="wise"), endpoint=endpoint, metrics=Metrics())
    try:
        yield ExternalHandle(JUDGE, model, sampling=SAMPLING)
    finally:
        await model.close()


@asynccontextmanager
async def asking(
    wise: ScriptedPolicy, *, metrics: Metrics | None = None
) -> AsyncIterator[tuple[AgentCalls, openai.AsyncOpenAI]]:
    """An episode of a solver and an external judge, and a client of its agent."""
    metrics = metrics or Metrics()
    async with (
        serving_agents(metrics) as endpoint,
        endpoint.open({"wise": wise}) as elsewhere,
        external(elsewhere) as judge,
        endpoint.open({"solver": ScriptedPolicy(lambda _: "7"), "judge": judge}) as calls,
        client_of(calls) as client,
    ):
        yield calls, client


async def ask(client: openai.AsyncOpenAI, model: str, **options: Any) -> Any:
    return await client.chat.completions.create(model=model, messages=[user("3 + 4?")], **options)  # type: ignore[list-item]


async def test_an_agent_asks_an_external_role_and_only_the_others_become_trajectories() -> None:
    wise, metrics = ScriptedPolicy(lambda _: "ok. STOP, and more than eight tokens"), Metrics()
    async with asking(wise, metrics=metrics) as (calls, client):
        await ask(client, "solver")
        answer = await ask(client, "judge", n=2, max_tokens=999, stop=[" STOP"])
        streamed = [part async for part in await ask(client, "judge", stream=True)]
        episode = calls.episode(reward=1.0)
    assert [choice.message.content for choice in answer.choices] == ["ok."] * 2
    assert "".join(part.choices[0].delta.content or "" for part in streamed) == "ok. STOP"
    assert [trajectory.role for trajectory in episode.trajectories] == ["solver"]
    assert (calls.answer, episode.metrics["agent_calls"]) == ("ok. STOP", 4)
    assert wise.prompts == ["<user>3 + 4?¶<assistant>"] * 3
    page = metrics.render().decode()
    assert 'astraflow_raas_agent_calls_total{outcome="answered",role="judge"} 2.0' in page
    assert 'astraflow_raas_agent_episodes_total{outcome="finished"} 2.0' in page


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"tools": [{"type": "function", "function": {"name": "add"}}]}, "leave out tools"),
        ({"logprobs": True}, "leave out logprobs"),
    ],
)
async def test_what_only_tokens_could_answer_is_refused(options: dict[str, Any], names: str) -> None:
    metrics = Metrics()
    async with asking(ScriptedPolicy(str.upper), metrics=metrics) as (_, client):
        with pytest.raises(openai.BadRequestError, match=names):
            await ask(client, "judge", **options)
        with pytest.raises(openai.BadRequestError, match="external endpoint"):
            await client.completions.create(model="judge", prompt="3 + 4?")
    assert 'astraflow_raas_agent_calls_total{outcome="refused",role="judge"} 2.0' in metrics.render().decode()


async def test_an_endpoint_that_this_node_lacks_ends_the_episode_at_no_cost() -> None:
    async with serving_agents() as endpoint, external(None) as judge:
        with pytest.raises(MissingCapability, match="--external judge=URL"):
            async with endpoint.open({"judge": judge}) as calls, client_of(calls) as client:
                await ask(client, "judge")
