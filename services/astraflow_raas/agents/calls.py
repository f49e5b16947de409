"""The calls that one agent makes in one episode, and the trajectories that they become.

Invariant: a call counts before it is sampled and never after the episode is over; what an agent asks for is bounded,
refused calls cost it nothing; an answer that the agent did not wait for is in no trajectory. Made by `endpoint` for
each episode; called by `app` for each request, and by the workflow that opened it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial

from astraflow.agents import AgentLimits
from astraflow.errors import RecipeError, RequestError
from astraflow.plugins import Episode, GenerateResult, Message, Policy, Tool
from astraflow_kit import traces
from astraflow_kit.log import get_logger
from astraflow_kit.metrics import Metrics
from astraflow_raas.agents.api_errors import ApiError, over_limit, refused_call, unauthorised
from astraflow_raas.agents.conversations import Conversations, Turn, ends_of
from astraflow_raas.agents.requests import ChatRequest, TextRequest
from astraflow_raas.agents.stops import sample

log = get_logger(__name__)

_FAULT_STATUS = 500
_LONG_CHARS = 16_384
"""Messages of more than this are tokenised in a thread: the event loop belongs to all episodes."""


class AgentFlooded(RequestError):
    """An agent went on asking after it had had what an episode may have."""

    reason, code = "AGENT_FLOODED", "RESOURCE_EXHAUSTED"


class TextOnly:
    """Base of policies that have text and no tokens here, because they are endpoints elsewhere: only `chat` works."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One answer: what the agent sees of it, and what was sampled."""

    message: Message
    result: GenerateResult

    @property
    def finish_reason(self) -> str:
        """Why it ended, in the words of the OpenAI API."""
        return "tool_calls" if self.message.tool_calls else self.result.finish_reason


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The answers to one request."""

    model: str
    num_prompt_tokens: int
    choices: Sequence[Choice]


class AgentCalls:
    """What one key opens. `on_fault` is called with what must end the episode."""

    def __init__(
        self,
        policies: Mapping[str, Policy],
        *,
        base_url: str,
        api_key: str,
        limits: AgentLimits,
        on_fault: Callable[[Exception], None],
        metrics: Metrics,
    ) -> None:
        self.policies = policies
        self.base_url = base_url
        self.api_key = api_key
        self.answer = ""
        self._place = traces.here()
        self._limits = limits
        self._on_fault = on_fault
        self._metrics = metrics
        self._slots = asyncio.Semaphore(limits.max_concurrent_calls)
        self._conversations = Conversations()
        self._running: set[asyncio.Task[Answers]] = set()
        self._is_over = False
        self._num_calls = self._num_refused = self._num_sampled = 0

    def episode(self, *, reward: float, metrics: Mapping[str, float] | None = None) -> Episode:
        names = {model: policy.name for model, policy in self.policies.items()}
        built = self._conversations.trajectories(policy_of=names, reward=reward)
        trajectories = tuple(item for item in built if self.policies[item.role].wants_trajectory)
        counted = {"agent_calls": float(self._num_calls), "completion_tokens": float(self._num_sampled)}
        return Episode(trajectories, counted | dict(metrics or {}))

    def close(self) -> None:
        """The episode is over: what still runs is cancelled, nothing else is taken."""
        self._is_over = True
        for task in self._running:
            task.cancel()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """One of the requests worked on at once."""
        async with self._slots:
            yield

    @contextmanager
    def recorded(self, path: str, traceparent: str) -> Iterator[None]:
        """Record a request in the trace of its episode: below the agent's own span where the agent continues that
        trace, else with a link to it.
        """
        caller = traces.place_of(traceparent)
        continues = caller is not None and self._place is not None and caller.trace_id == self._place.trace_id
        links = [caller] if caller is not None and not continues else []
        with traces.span(f"POST {path}", under=caller if continues else self._place, links=links):
            yield

    def start(self, request: ChatRequest | TextRequest) -> "asyncio.Task[Answers]":
        """Begin to answer; cancelled when the episode ends. Raises ApiError for what it may not ask."""
        policy = self._policy(request.model)
        try:
            self._admit(request.n)
        except ApiError:
            self._count(request.model, "refused")
            raise
        if isinstance(request, TextRequest):
            answer = self._complete(policy, request)
        elif isinstance(policy, TextOnly):
            answer = self._say(policy, request)
        else:
            answer = self._chat(policy, request)
        task = asyncio.create_task(answer)
        self._running.add(task)
        task.add_done_callback(partial(self._ended, model=request.model))
        return task

    def _ended(self, task: "asyncio.Task[Answers]", *, model: str) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        refused = isinstance(error, ApiError) and error.status < _FAULT_STATUS
        outcome = "refused" if refused else "failed" if error else "answered"
        self._count(model, "cancelled" if task.cancelled() else outcome)

    def _count(self, model: str, outcome: str) -> None:
        self._metrics.increment("astraflow_raas_agent_calls_total", role=model, outcome=outcome)

    def _policy(self, model: str) -> Policy:
        if self._is_over:
            raise unauthorised()
        if model not in self.policies:
            known = ", ".join(self.policies)
            raise ApiError(
                404, f"no model {model!r}; this episode has {known}", code="model_not_found", param="model"
            )
        return self.policies[model]

    def _admit(self, num_calls: int) -> None:
        limits, complaint = self._limits, None
        if self._num_calls + num_calls > limits.max_calls:
            complaint = over_limit("calls", limits.max_calls, remedy="raise max_calls")
        elif self._num_sampled >= limits.max_sampled_tokens:
            complaint = over_limit(
                "sampled tokens", limits.max_sampled_tokens, remedy="raise max_sampled_tokens"
            )
        if complaint is None:
            self._num_calls += num_calls
            return
        self._num_refused += 1
        if self._num_refused > limits.max_calls:
            self._on_fault(AgentFlooded(f"the agent was refused {self._num_refused} calls: {complaint}"))
        raise complaint

    async def _say(self, policy: Policy, request: ChatRequest) -> Answers:
        """The answers of a policy without tokens: they are in no trajectory."""
        lacking = [
            name for name, given in (("tools", request.offered), ("logprobs", request.logprobs)) if given
        ]
        if lacking:
            what = f"{request.model} is an external endpoint, which is asked for text only; leave out {lacking[0]}"
            raise ApiError(400, what, code="unsupported_parameter", param=lacking[0])
        wanted = min(request.max_new_tokens or policy.max_new_tokens, policy.max_new_tokens)
        asked = [policy.chat(request.conversation, max_new_tokens=wanted) for _ in range(request.n)]
        with self._judged():
            results = await asyncio.gather(*asked)
        said = [Message("assistant", _before(request.stops, result.text)) for result in results]
        self.answer = said[-1].content
        choices = [Choice(message=text, result=result) for text, result in zip(said, results, strict=True)]
        return Answers(model=request.model, num_prompt_tokens=0, choices=choices)

    async def _chat(self, policy: Policy, request: ChatRequest) -> Answers:
        messages, tools = request.conversation, request.offered
        # Tools are part of a conversation's beginning: templates write them in front.
        head = repr((request.model, tools))
        parent, prompt_ids = await self._prompt(policy, messages, tools, head=head)
        results = await self._sample(policy, request, parent, prompt_ids)
        callable_tools = () if request.tool_choice == "none" else tools
        choices = [_choice(policy, result, prompt_ids, callable_tools) for result in results]
        ends = [ends_of(head, (*messages, choice.message))[-1] for choice in choices]
        return self._answers(request, choices, ends, turn=(parent, prompt_ids, messages[-1].role))

    async def _complete(self, policy: Policy, request: TextRequest) -> Answers:
        text = f"{request.model}\0{request.prompt}"
        found = self._conversations.continued_text(text)
        parent, added = found or (None, request.prompt)
        with self._judged():
            added_ids = await _tokens(partial(policy.encode, added), len(added))
        prompt_ids = [*(parent.token_ids() if parent else ()), *added_ids]
        results = await self._sample(policy, request, parent, prompt_ids)
        choices = [Choice(message=Message("assistant", result.text), result=result) for result in results]
        # What ended with a special token has no text that a prompt could go on from.
        ends = [
            text + policy.decode(result.token_ids) if policy.decode(result.token_ids[-1:]) else None
            for result in results
        ]
        return self._answers(request, choices, ends, turn=(parent, prompt_ids, ""))

    def _answers(
        self,
        request: ChatRequest | TextRequest,
        choices: Sequence[Choice],
        ends: Sequence[bytes | str | None],
        *,
        turn: tuple[Turn | None, Sequence[int], str],
    ) -> Answers:
        parent, prompt_ids, role = turn
        given_ids = tuple(prompt_ids[parent.num_tokens if parent else 0 :])
        for choice, end in zip(choices, ends, strict=True):
            self._conversations.add(Turn(request.model, parent, given_ids, role, choice.result), end=end)
        self.answer = choices[-1].message.content
        return Answers(model=request.model, num_prompt_tokens=len(prompt_ids), choices=choices)

    async def _prompt(
        self, policy: Policy, messages: Sequence[Message], tools: Sequence[Tool], *, head: str
    ) -> tuple[Turn | None, list[int]]:
        """The turn that the messages continue, if any, and all tokens to sample after."""
        found = self._conversations.continued(ends_of(head, messages))
        num_chars = sum(len(message.content) for message in messages)
        with self._judged():
            if found is not None:
                turn, length = found
                extend = partial(policy.extend, turn.token_ids(), messages[length:], tools=tools)
                try:
                    return turn, await _tokens(extend, num_chars)
                except (RecipeError, ValueError) as error:
                    log.info("agent.not_continued", policy_id=policy.name, why=str(error))
            return None, await _tokens(partial(policy.encode, messages, tools=tools), num_chars)

    async def _sample(
        self,
        policy: Policy,
        request: ChatRequest | TextRequest,
        parent: Turn | None,
        prompt_ids: Sequence[int],
    ) -> Sequence[GenerateResult]:
        left = max(1, self._limits.max_sampled_tokens - self._num_sampled)
        wanted = min(request.max_new_tokens or policy.max_new_tokens, policy.max_new_tokens, left)
        calls = [
            asyncio.ensure_future(sample(policy, prompt_ids, max_new_tokens=wanted, stops=request.stops))
            for _ in range(request.n)
        ]
        try:
            with self._judged(), self._conversations.room_for(request.n, after=parent):
                results = await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()
        self._num_sampled += sum(len(result.token_ids) for result in results)
        return results

    @contextmanager
    def _judged(self) -> Iterator[None]:
        """Answer what the agent asked wrongly; anything else is not its fault and ends the episode."""
        try:
            yield
        except ApiError:
            raise
        except RequestError as error:
            raise refused_call(error) from error
        except Exception as error:
            self._on_fault(error)
            raise ApiError(
                500, "the policy cannot answer; the episode is over", code="episode_failed"
            ) from error


def _before(stops: Sequence[str], text: str) -> str:
    """The text up to the first of these."""
    return min((text.partition(stop)[0] for stop in stops), key=len, default=text)


def _choice(
    policy: Policy, result: GenerateResult, prompt_ids: Sequence[int], tools: Sequence[Tool]
) -> Choice:
    message = policy.read(result.token_ids, tools=tools, prompt_ids=prompt_ids)
    # A text that ended at a stop leaves it out.
    return Choice(message=message if message.tool_calls else Message("assistant", result.text), result=result)


async def _tokens(encode: Callable[[], list[int]], num_chars: int) -> list[int]:
    return await asyncio.to_thread(encode) if num_chars > _LONG_CHARS else encode()
