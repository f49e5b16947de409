"""Agents that know nothing of AstraFlow train: a program with the `openai` client, and two frameworks from PyPI."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from support.audit import audit
from support.development import ROOT, RunFiles, dev, finish

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
RECIPE = ROOT / "recipes" / "agent-tiny"
SHORT = (
    *("--steps", "2", "--set", "dataflow.group_size=2", "--set", "dataflow.evaluation.final_samples=4"),
    *("--set", "run.name=quickstart"),  # the run that the audit looks for
)
FRAMEWORKS = '''

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

set_tracing_disabled(True)


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


class Frameworks:
    """The OpenAI Agents SDK for every second task, pydantic-ai for the others; each asks twice."""

    def __init__(self, *, reward, endpoint) -> None:
        self.reward, self.endpoint = reward, endpoint

    async def run(self, task, policies):
        ask = self.agents_sdk if int(task.task_id[-1]) % 2 else self.pydantic_ai
        async with (
            self.endpoint.open(policies) as session,
            AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client,
        ):
            said = await ask(client, task.messages[0].content)
            score = await self.reward(task, said)
            return session.episode(reward=score.reward, metrics={ask.__name__: 1.0})

    async def agents_sdk(self, client, question):
        model = OpenAIChatCompletionsModel(model="solver", openai_client=client)
        agent = Agent(name="a", instructions="Swap.", tools=[function_tool(add)], model=model)
        first = await Runner.run(agent, question)
        again = [*first.to_input_list(), {"role": "user", "content": "Again."}]
        return (await Runner.run(agent, again)).final_output

    async def pydantic_ai(self, client, question):
        model = OpenAIChatModel("solver", provider=OpenAIProvider(openai_client=client))
        agent = PydanticAgent(model, instructions="Swap.", tools=[add])
        first = await agent.run(question)
        return (await agent.run("Again.", message_history=first.all_messages())).output
'''


def test_an_agent_program_trains(tmp_path: Path) -> None:
    with dev(tmp_path, *SHORT, "--serve", "solver=2", recipe=RECIPE) as launcher:
        summary = finish(launcher, tmp_path, timeout_s=390)
    check(tmp_path, summary)
    assert sum('"engine.ready"' in line for line in node_log(tmp_path)) == 2
    assert not [line for line in node_log(tmp_path) if "agent.failed" in line]


def test_two_frameworks_train(tmp_path: Path) -> None:
    folder = tmp_path / "frameworks"
    shutil.copytree(RECIPE, folder)
    with (folder / "recipe.py").open("a") as code:
        code.write(FRAMEWORKS)
    longer = ("--set", "policies.solver.model.architecture.max_position_embeddings=1024")
    with dev(
        tmp_path, *SHORT, *longer, "--set", "raas.workflow=recipe:Frameworks", recipe=folder
    ) as launcher:
        summary = finish(launcher, tmp_path, timeout_s=390)
    check(tmp_path, summary)
    turns = [line for line in node_log(tmp_path) if "agent.not_continued" in line]
    assert not turns


def check(folder: Path, summary: dict[str, Any]) -> None:
    """Two steps were trained, and nothing was lost."""
    assert summary["steps"] == 2
    assert summary["conservation_error"] == 0
    assert summary["trajectories"]["trained"] >= 8
    assert audit(folder).violations == []


def node_log(folder: Path) -> list[str]:
    return (RunFiles(folder).data_dir / "logs" / "node-1.log").read_text().splitlines()
