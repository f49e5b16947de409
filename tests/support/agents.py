"""What tests of the endpoint need: a policy of one token a character that says what a script says, and a client."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from openai import AsyncOpenAI

from astraflow.agents import AgentLimits
from astraflow.plugins import GenerateResult, Message, Tool, ToolCall, Trajectory, VersionSpan
from astraflow_kit.metrics import Metrics
from astraflow_raas.agents.calls import AgentCalls
from astraflow_raas.agents.endpoint import Endpoint
from astraflow_raas.policies.tool_calls import reader_of

END = "¶"
"""The stop token; the policy ends its turns with it."""


@dataclass
class ScriptedPolicy:
    """Says `answer(prompt)`; every token is a character, sampled under `version` with log-prob −0.5."""

    answer: Callable[[str], str]
    name: str = "solver"
    role: str = "solver"
    wants_trajectory: bool = True
    version: int = 3
    max_new_tokens: int = 200
    is_evaluation: bool = False
    fault: Exception | None = None
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    prompts: list[str] = field(default_factory=list)
    num_cancelled: int = 0

    def __post_init__(self) -> None:
        self.may_answer.set()

    def encode(self, messages: Sequence[Message] | str, *, tools: Sequence[Tool] = ()) -> list[int]:
        if isinstance(messages, str):
            return [ord(character) for character in messages]
        listed = "".join(f"<tool {tool.name}>{END}" for tool in tools)
        written = "".join(f"<{message.role}>{message.content}{END}" for message in messages)
        return [ord(character) for character in f"{listed}{written}<assistant>"]

    def extend(
        self, token_ids: Sequence[int], messages: Sequence[Message], *, tools: Sequence[Tool] = ()
    ) -> list[int]:
        is_ended = token_ids[-1] == ord(END)
        return [*token_ids, *([] if is_ended else [ord(END)]), *self.encode(messages)]

    def demonstrate(self, text: str) -> GenerateResult:
        ids = tuple(map(ord, text + END))
        return GenerateResult(ids, (0.0,) * len(ids), (VersionSpan(0, len(ids), self.version),), text, "stop")

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids)).replace(END, "")

    def read(
        self, token_ids: Sequence[int], *, tools: Sequence[Tool] = (), prompt_ids: Sequence[int] = ()
    ) -> Message:
        text = self.decode(token_ids)
        reader = reader_of("<tool_call>")
        assert reader is not None
        said, calls = reader(text, tools) if tools else (text, [])
        made = [
            ToolCall(f"{len(prompt_ids)}.{index}", name, json.dumps(arguments))
            for index, (name, arguments) in enumerate(calls)
        ]
        return Message("assistant", said, tool_calls=tuple(made))

    async def chat(self, messages: Sequence[Message], *, max_new_tokens: int | None = None) -> GenerateResult:
        return await self.generate(self.encode(messages), max_new_tokens=max_new_tokens)

    async def generate(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int | None = None
    ) -> GenerateResult:
        prompt = "".join(map(chr, prompt_ids))
        self.prompts.append(prompt)
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.fault is not None:
            raise self.fault
        asked, turn, said = prompt.rpartition("<assistant>")
        # Of an answer that is sampled in slices, the next one.
        whole = (self.answer(asked + turn) + END)[len(said) :] if turn else self.answer(prompt) + END
        text = whole[: max_new_tokens or self.max_new_tokens]
        ids = tuple(map(ord, text))
        spans = (VersionSpan(0, len(ids), self.version),)
        reason = "stop" if len(text) == len(whole) else "length"
        return GenerateResult(ids, (-0.5,) * len(ids), spans, self.decode(ids), reason)


@asynccontextmanager
async def serving_agents(metrics: Metrics | None = None) -> AsyncIterator[Endpoint]:
    """An endpoint that serves."""
    endpoint = Endpoint(metrics)
    await endpoint.start()
    running = asyncio.create_task(endpoint.run())
    try:
        yield endpoint
    finally:
        await endpoint.stop(deadline_s=5.0)
        await running


@asynccontextmanager
async def opened(
    *policies: ScriptedPolicy, limits: AgentLimits | None = None
) -> AsyncIterator[tuple[AgentCalls, AsyncOpenAI]]:
    """One episode of an endpoint, and a client with its key that repeats nothing."""
    by_name = {policy.name: policy for policy in policies}
    async with (
        serving_agents() as endpoint,
        endpoint.open(by_name, limits=limits) as calls,
        client_of(calls) as client,
    ):
        yield calls, client


def client_of(calls: AgentCalls, **differing: object) -> AsyncOpenAI:
    """The real client."""
    given = {"base_url": calls.base_url, "api_key": calls.api_key, "max_retries": 0, "timeout": 20.0}
    return AsyncOpenAI(**(given | differing))  # type: ignore[arg-type]


def trained_text(trajectory: Trajectory) -> list[str]:
    """The pieces of a trajectory that are trained on."""
    text = "".join(
        chr(token) if chosen else "\0"
        for token, chosen in zip(trajectory.token_ids, trajectory.loss_mask, strict=True)
    )
    return [piece for piece in text.split("\0") if piece]


def whole_text(trajectory: Trajectory) -> str:
    """All of a trajectory."""
    return "".join(map(chr, trajectory.token_ids))


def user(content: str) -> Mapping[str, str]:
    """A user's turn, as a client writes it."""
    return {"role": "user", "content": content}
