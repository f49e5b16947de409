"""What the OpenAI endpoint costs the node for each call, beside the same call through a handle.

Invariant: the answers are ready at once, so all CPU time of the measuring thread is the node's own; the client is in
another thread and not counted. Called once.
"""

import asyncio
import time
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx

from astraflow.plugins import Message, Policy, VersionSpan
from astraflow.recipe import ResolvedRole
from astraflow.rollout.v1 import task_pb2
from astraflow_bench.figures import Figure
from astraflow_raas.agents.endpoint import Endpoint
from astraflow_raas.engine.base import GenerateCall, Generation
from astraflow_raas.policies.tokenizer import Tokenizer, load_tokenizer
from astraflow_raas.work.policy_handle import PolicyHandle
from astraflow_trainer.model.tokenizer import TokenizerSettings, train_tokenizer

_ROLE = "solver"
_NUM_TOKENS = 24
_CALLS_PER_EPISODE = 8
_CLIENTS = 4
_QUESTION = "Ann has 12 apples and gets 34 more. How many now?"


class _Instant:
    """A served policy whose answers are there already."""

    experts = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.version = tokenizer, 0

    async def generate(self, call: GenerateCall, *, key: Hashable) -> Generation:
        """Some tokens."""
        return Generation(
            token_ids=tuple(range(10, 10 + call.max_new_tokens)),
            logprobs=(-1.0,) * call.max_new_tokens,
            spans=(VersionSpan(0, call.max_new_tokens, 0),),
            finish_reason="length",
        )


async def measure_endpoint(folder: Path, *, calls: int) -> list[Figure]:
    """CPU milliseconds of a chat completion through the endpoint and through a handle."""
    tokenizer = train_tokenizer([_QUESTION], settings=TokenizerSettings(vocab_size=300))
    tokenizer.save_pretrained(folder)
    sampler = _Instant(load_tokenizer(folder))
    rounds = max(1, calls // _CALLS_PER_EPISODE)
    through_handle = await _by_handle(sampler, rounds=rounds)
    through_endpoint = await _by_endpoint(sampler, rounds=rounds)
    row = partial(Figure, subject="", unit="CPU-ms")
    return [
        row(what="a chat call through a handle", value=through_handle),
        row(what="a chat call through the OpenAI endpoint", value=through_endpoint),
        row(what="OpenAI endpoint, on top", value=through_endpoint - through_handle),
    ]


async def _by_handle(sampler: _Instant, *, rounds: int) -> float:
    began = time.thread_time()
    for _ in range(rounds):
        handle = _handle(sampler)
        for _ in range(_CALLS_PER_EPISODE):
            await handle.chat([Message("user", _QUESTION)])
    return 1e3 * (time.thread_time() - began) / (rounds * _CALLS_PER_EPISODE)


async def _by_endpoint(sampler: _Instant, *, rounds: int) -> float:
    endpoint = Endpoint()
    await endpoint.start()
    serving = asyncio.create_task(endpoint.run())
    loop, spent = asyncio.get_running_loop(), 0.0
    try:
        with ThreadPoolExecutor(_CLIENTS) as threads, httpx.Client(trust_env=False) as client:
            for _ in range(rounds):
                policies: dict[str, Policy] = {_ROLE: _handle(sampler)}
                async with endpoint.open(policies) as session:
                    url = f"{session.base_url}/chat/completions"
                    key = {"authorization": f"Bearer {session.api_key}"}
                    began = time.thread_time()
                    asks = (
                        loop.run_in_executor(threads, _ask, client, url, key)
                        for _ in range(_CALLS_PER_EPISODE)
                    )
                    await asyncio.gather(*asks)
                    spent += time.thread_time() - began
    finally:
        await endpoint.stop(deadline_s=5.0)
        await serving
    return 1e3 * spent / (rounds * _CALLS_PER_EPISODE)


def _ask(client: httpx.Client, url: str, headers: dict[str, str]) -> None:
    body = {"model": _ROLE, "messages": [{"role": "user", "content": _QUESTION}]}
    client.post(url, json=body, headers=headers).raise_for_status()


def _handle(sampler: _Instant) -> PolicyHandle:
    lease = task_pb2.Lease(run_id="bench", lease_id="lease")
    lease.sampling[_ROLE].MergeFrom(
        task_pb2.SamplingParams(max_new_tokens=_NUM_TOKENS, temperature=1.0, top_p=1.0)
    )
    return PolicyHandle(
        ResolvedRole(name=_ROLE, policy_id=_ROLE, is_trained=True),
        sampler=sampler,
        lease=lease,
        member=0,
        episode_id="episode",
        batch_key=lambda _limit: None,
    )
