"""Agents that know nothing of AstraFlow train: a program with the `openai` client, and two frameworks from PyPI."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from astraflow_bench.traces import Collector, Received
from support.audit import audit
from support.development import ROOT, RunFiles, dev, finish
from support.otlp import ALL, attributes, named
from support.sandbox import needs_bubblewrap

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400), needs_bubblewrap]
RECIPE = ROOT / "recipes" / "agent-tiny"
SHORT = (
    *("--steps", "2", "--set", "dataflow.group_size=2", "--set", "dataflow.evaluation.final_samples=4"),
    *("--set", "run.name=quickstart"),  # the run that the audit looks for
)
# As an instrumented agent would: a span of its own in the trace that it is given.
OWN_SPAN = """OpenAI(
    default_headers={"traceparent": os.environ["TRACEPARENT"][:36] + "00f067aa0ba902b7-01"}
)"""
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


@dataclass(frozen=True)
class Trained:
    """A finished run of an agent program that goes on with the trace it is given, and the spans of all daemons."""

    folder: Path
    summary: dict[str, Any]
    received: Sequence[Received]

    def of(self, name: str) -> list[Span]:
        """The spans of this name."""
        return named(self.received, name)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Two steps, with traces."""
    folder = tmp_path_factory.mktemp("agent")
    recipe = folder / "agent-tiny"
    shutil.copytree(RECIPE, recipe)
    agent = recipe / "agent.py"
    agent.write_text(agent.read_text().replace("OpenAI()", OWN_SPAN))
    with (
        Collector() as collector,
        dev(
            folder,
            *SHORT,
            *("--serve", "solver=2", "--traces"),
            recipe=recipe,
            variables={**collector.environment, **ALL},
        ) as launcher,
    ):
        return Trained(folder, finish(launcher, folder, timeout_s=390), collector.received)


def test_an_agent_program_trains(trained: Trained) -> None:
    check(trained.folder, trained.summary)
    assert sum('"engine.ready"' in line for line in node_log(trained.folder)) == 2
    assert not [line for line in node_log(trained.folder) if "agent.failed" in line]


def test_what_was_trained_on_is_one_trace_from_the_agents_call_to_the_version(trained: Trained) -> None:
    """Everything that is known of a task's trace, of one that the first step trained on."""
    told = next(span for span in trained.of("train solver") if attributes(span)["astraflow.step"] == 1)
    own = [one for one in trained.received if one.span.trace_id == told.trace_id]
    (task,) = named(own, "task")
    episodes = {span.span_id: span for span in named(own, "episode")}
    asked = {span.span_id: span for span in named(own, "POST /v1/chat/completions")}
    chats, pushes = named(own, "chat solver"), named(own, "push")
    assert (task.parent_span_id, told.parent_span_id) == (b"", task.span_id)
    assert {span.parent_span_id for span in episodes.values()} == {task.span_id}
    assert len(episodes) == len(pushes) == 2
    assert {span.parent_span_id for span in pushes} == set(episodes)
    assert {span.parent_span_id for span in asked.values()} == {bytes.fromhex("00f067aa0ba902b7")}
    assert {span.parent_span_id for span in chats} == set(asked)
    assert {one.service for one in own} == {f"astraflow-{name}" for name in ("raas", "dataflow", "trainer")}
    assert attributes(told)["astraflow.version"] == 1


def test_a_call_says_what_the_conventions_for_generative_ai_say(trained: Trained) -> None:
    said = [attributes(span) for span in trained.of("chat solver")]
    assert all(one["gen_ai.operation.name"] == "chat" for one in said)
    assert {one["gen_ai.response.model"] for one in said} <= {"solver@0", "solver@1", "solver@2"}
    assert all(isinstance(one["gen_ai.usage.output_tokens"], int) for one in said)
    assert {attributes(span)["gen_ai.agent.name"] for span in trained.of("episode")} == {"AgentProcess"}


def test_a_step_and_its_tasks_name_each_other_and_its_trace_ends_with_the_version(trained: Trained) -> None:
    (step,) = [span for span in trained.of("step") if attributes(span)["astraflow.step"] == 1 and span.links]
    told = [span for span in trained.of("train solver") if span.links[0].span_id == step.span_id]
    assert {link.trace_id for link in step.links} == {span.trace_id for span in told}
    own = [one for one in trained.received if one.span.trace_id == step.trace_id]
    below = {span.name for span in (one.span for one in own) if span.parent_span_id == step.span_id}
    assert {"acquire", "fetch", "train", "publish"} <= below
    (publish,) = named(own, "publish")
    assert attributes(publish)["astraflow.version"] == 1
    served = {one.span.name: one.service for one in own if "/" in one.span.name}
    assert served["astraflow.dataflow.v1.BatchService/AcquireBatch"] == "astraflow-dataflow"
    (announced,) = named(own, "astraflow.dataflow.v1.VersionService/Publish")
    assert announced.parent_span_id == publish.span_id


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
