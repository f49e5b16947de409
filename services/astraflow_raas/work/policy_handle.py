"""The `Policy` that a workflow holds: the policy that plays one role, bound to one episode.

Invariant: every call of an episode has its own seed, derived from the lease, so an episode repeats on another
node as far as its engine is deterministic; a call that the engine lost is made again under the same seed,
because nothing of it was used. Made by `session` for each episode; called by workflow plug-ins.
"""

import asyncio
import hashlib
import json
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from operator import index
from typing import Protocol

from astraflow.errors import InvalidArgumentError
from astraflow.plugins import GenerateResult, Message, PolicyUnavailable, Tool, ToolCall, VersionSpan
from astraflow.recipe import ResolvedRole
from astraflow.rollout.v1 import task_pb2
from astraflow_kit import failpoints, traces
from astraflow_kit.log import get_logger
from astraflow_raas.engine.base import ABORTED, EngineDown, EngineUnavailable, GenerateCall, Generation
from astraflow_raas.policies.experts import ExpertLayers
from astraflow_raas.policies.tokenizer import Tokenizer
from astraflow_raas.work.expert_records import ExpertRecord
from astraflow_raas.work.lease import call_seed, is_evaluation

log = get_logger(__name__)

_FIRST_RETRY_S = 0.1
_MAX_RETRY_S = 2.0


class Sampler(Protocol):
    """The part of a served policy that an episode needs."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The policy's tokenizer."""

    @property
    def version(self) -> int | None:
        """Version that is served; None before the first."""

    @property
    def experts(self) -> ExpertLayers | None:
        """The model's mixtures of experts, where what they choose is recorded; else None."""

    async def generate(self, call: GenerateCall, *, key: Hashable) -> Generation:
        """Sample one call; waits for an engine. Raises the errors of `engine.base`."""


class PolicyHandle:
    """A role's policy bound to one member of a lease. Used by one workflow run; not shared."""

    def __init__(
        self,
        role: ResolvedRole,
        *,
        sampler: Sampler,
        lease: task_pb2.Lease,
        member: int,
        episode_id: str,
        batch_key: Callable[[int], Hashable],
    ) -> None:
        self.name = role.policy_id
        self.role = role.name
        self.wants_trajectory = role.is_trained and role.name not in lease.uncredited_roles
        self._sampler = sampler
        self._lease = lease
        self._sampling = lease.sampling[self.name]
        self.max_new_tokens = self._sampling.max_new_tokens
        self.is_evaluation = is_evaluation(lease)
        self._member = member
        self._episode_id = episode_id
        self._batch_key = batch_key
        self._num_calls = 0
        self.waiting_for_engine = False
        """True while a call waits for an engine that is down: then a timeout is the engine's fault."""
        self.unavailable: PolicyUnavailable | None = None
        """What the last call was refused with because there is no engine."""
        self.versions: set[int] = set()
        """Versions that sampled for it."""
        self.lost_calls = 0
        """Calls that an engine took along when it was lost."""
        self.experts = ExpertRecord() if self._records else None
        """What its calls recorded; None where nothing is."""

    def encode(self, messages: Sequence[Message] | str, *, tools: Sequence[Tool] = ()) -> list[int]:
        return list(self._sampler.tokenizer.encode(messages, tools))

    def extend(
        self, token_ids: Sequence[int], messages: Sequence[Message], *, tools: Sequence[Tool] = ()
    ) -> list[int]:
        if not token_ids or not messages:
            raise InvalidArgumentError(
                f"policy {self.name!r}: extend needs tokens that end with an assistant's turn (got {len(token_ids)}) "
                f"and messages (got {len(messages)}); encode the first prompt"
            )
        added = self._sampler.tokenizer.continuation(messages, tools)
        # The policy has ended its turn itself unless it ran out of tokens.
        is_ended = token_ids[-1] == added[0] and added[0] in self._sampler.tokenizer.stop_token_ids
        return [*token_ids, *added[is_ended:]]

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._sampler.tokenizer.decode(token_ids)

    def read(
        self, token_ids: Sequence[int], *, tools: Sequence[Tool] = (), prompt_ids: Sequence[int] = ()
    ) -> Message:
        said, calls = self._sampler.tokenizer.read(token_ids, tools)
        if not calls:
            return Message("assistant", said)
        whole = array("q", (*prompt_ids, *token_ids)).tobytes()
        made = tuple(
            ToolCall(_call_id(whole, index), name, json.dumps(arguments))
            for index, (name, arguments) in enumerate(calls)
        )
        return Message("assistant", said, tool_calls=made)

    async def generate(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int | None = None
    ) -> GenerateResult:
        call = self._next_call(prompt_ids, max_new_tokens=max_new_tokens)
        failpoints.hit("raas.generating")
        with traces.span(f"chat {self.name}") as recorded:
            generation = await self._sample(call)
            if recorded.is_recording():
                recorded.set_attributes(_answered(self.name, call, generation))
        self.versions.update(span.version for span in generation.spans)
        if self.experts is not None and self._sampler.experts is not None:
            routed = self._sampler.experts.read(generation.experts, rid=call.rid)
            self.experts.add((*call.prompt_ids, *generation.token_ids), routed)
        return GenerateResult(
            token_ids=generation.token_ids,
            logprobs=generation.logprobs,
            version_spans=generation.spans,
            text=self.decode(generation.token_ids),
            finish_reason=generation.finish_reason,
        )

    async def chat(self, messages: Sequence[Message], *, max_new_tokens: int | None = None) -> GenerateResult:
        return await self.generate(self.encode(messages), max_new_tokens=max_new_tokens)

    def demonstrate(self, text: str) -> GenerateResult:
        if self.is_evaluation:
            raise InvalidArgumentError(
                f"policy {self.name!r}: an evaluation judges what the policy says; sample where `is_evaluation`"
            )
        tokenizer, version = self._sampler.tokenizer, self._sampler.version
        token_ids = tokenizer.encode(text)
        if tokenizer.end_of_turn is not None:
            token_ids = (*token_ids, tokenizer.end_of_turn)
        if version is None or not token_ids:
            raise InvalidArgumentError(
                f"policy {self.name!r}: a demonstration needs weights on this node (version {version}) and a text "
                f"(got {len(text)} characters)"
            )
        spans = (VersionSpan(0, len(token_ids), version),)
        return GenerateResult(token_ids, (0.0,) * len(token_ids), spans, text, "stop")

    def _next_call(self, prompt_ids: Sequence[int], *, max_new_tokens: int | None) -> GenerateCall:
        limit = self._sampling.max_new_tokens if max_new_tokens is None else max_new_tokens
        if not prompt_ids or not 1 <= limit <= self._sampling.max_new_tokens:
            raise InvalidArgumentError(
                f"policy {self.name!r}: a call needs a prompt (got {len(prompt_ids)} tokens) and "
                f"max_new_tokens in [1, {self._sampling.max_new_tokens}] (got {limit}); raise "
                f"policies.{self.name}.sampling.max_new_tokens"
            )
        number, self._num_calls = self._num_calls, self._num_calls + 1
        return GenerateCall(
            # Ends in a sign of its own: SGLang aborts by prefix, and call 1 must not take call 10 along.
            rid=f"{self._episode_id}-{self.role}-{number};",
            # A workflow may count in numpy's integers, which no JSON holds.
            prompt_ids=tuple(map(index, prompt_ids)),
            max_new_tokens=limit,
            temperature=self._sampling.temperature,
            top_p=self._sampling.top_p,
            top_k=self._sampling.top_k,
            seed=call_seed(self._lease, member=self._member, role=self.role, call=number),
            stop_token_ids=self._sampler.tokenizer.stop_token_ids,
            records_experts=self._records,
        )

    @property
    def _records(self) -> bool:
        return self.wants_trajectory and not self.is_evaluation and self._sampler.experts is not None

    async def _sample(self, call: GenerateCall) -> Generation:
        """Call until an engine answers in full; the episode's deadline, which cancels this task, is the
        bound."""
        wait_s, repeats = _FIRST_RETRY_S, 0
        while True:
            try:
                generation = await self._sampler.generate(call, key=self._batch_key(call.max_new_tokens))
                if generation.finish_reason != ABORTED:
                    self.waiting_for_engine = False
                    return generation
                message = f"it aborted the call after {len(generation.token_ids)} tokens"
            except EngineUnavailable as error:
                message = error.message
                self.lost_calls += 1
            except EngineDown as error:
                self.unavailable = PolicyUnavailable(error.message)
                raise self.unavailable from error
            self.waiting_for_engine, repeats = True, repeats + 1
            log.info("call.repeated", rid=call.rid, wait_s=wait_s, why=message)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _MAX_RETRY_S)
            # The engine may still run the lost call: its id must not be used twice.
            call = replace(call, rid=f"{call.rid.partition(';')[0]};{repeats};")


def _answered(policy_id: str, call: GenerateCall, generation: Generation) -> traces.Attributes:
    """A call in the words of OpenTelemetry's conventions for generative AI; what answered is the policy at its newest
    version.
    """
    newest = max((span.version for span in generation.spans), default=None)
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "astraflow",
        "gen_ai.request.model": policy_id,
        "gen_ai.response.model": policy_id if newest is None else f"{policy_id}@{newest}",
        "gen_ai.response.finish_reasons": (generation.finish_reason,),
        "gen_ai.usage.input_tokens": len(call.prompt_ids),
        "gen_ai.usage.output_tokens": len(generation.token_ids),
    }


def _call_id(whole: bytes, index: int) -> str:
    """Equal on every node, and of nine letters and digits: some chat templates take nothing else."""
    return hashlib.blake2b(whole, salt=index.to_bytes(8, "big"), digest_size=8).hexdigest()[:9]
