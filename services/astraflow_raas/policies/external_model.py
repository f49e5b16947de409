"""A policy that is an OpenAI-compatible endpoint elsewhere, asked for text.

Invariant: calls are bounded at once, in time and in attempts, and each attempt is counted by its outcome; what another
node may do better (no endpoint here, a key that is refused) raises `MissingCapability` and costs no attempt. Address
and key come from the node's settings, never from the recipe, and the key is in no log. Made by `assembly`; called
through `external_handle`.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from astraflow.plugins import GenerateResult, Message, MissingCapability
from astraflow.recipe import ExternalSettings
from astraflow.rollout.v1 import task_pb2
from astraflow_kit.http_answers import AnswerRefused, post_json
from astraflow_kit.log import get_logger
from astraflow_kit.metrics import Metrics
from astraflow_kit.settings import read_secret
from astraflow_raas.engine.base import EngineFaulty, EngineRefused
from astraflow_raas.settings import NodeSettings

log = get_logger(__name__)

_BUSY = frozenset({408, 409, 425, 429})
_NOT_ALLOWED = frozenset({401, 403})
_FIRST_WAIT_S, _MAX_WAIT_S = 0.5, 20.0
_SHOWN_CHARS = 300
_MAX_ANSWER_BYTES = 16 * 2**20


class _Busy(Exception):
    """The endpoint may answer the same call later, `wait_s` from now if it says when."""

    def __init__(self, problem: str, *, wait_s: float = 0.0) -> None:
        super().__init__(problem)
        self.wait_s = wait_s


@dataclass(frozen=True, kw_only=True)
class ExternalEndpoint:
    """Where an external policy is asked, on this node."""

    base_url: str
    key: str = field(default="", repr=False)


def endpoints_of(settings: NodeSettings) -> Mapping[str, ExternalEndpoint]:
    """Return a node's endpoints by policy. Raises SettingsError for a key file that cannot be read."""
    files = {name: path for name, _, path in (text.partition("=") for text in settings.external_key_file)}
    keys = {name: read_secret(Path(path).expanduser()) for name, path in files.items()}
    return {
        name: ExternalEndpoint(base_url=url, key=keys.get(name, ""))
        for name, _, url in (text.partition("=") for text in settings.external)
    }


class ExternalModel:
    """One external policy on this node. Owned by the event loop."""

    def __init__(
        self,
        policy_id: str,
        settings: ExternalSettings,
        *,
        endpoint: ExternalEndpoint | None,
        metrics: Metrics,
        first_wait_s: float = _FIRST_WAIT_S,
    ) -> None:
        self._policy_id = policy_id
        self._settings = settings
        self._endpoint = endpoint
        self._metrics = metrics
        self._first_wait_s = first_wait_s
        self._slots = asyncio.Semaphore(settings.max_concurrent_calls)
        self._client: httpx.AsyncClient | None = None

    async def chat(
        self, messages: Sequence[Message], *, sampling: task_pb2.SamplingParams, max_new_tokens: int
    ) -> GenerateResult:
        """Return the endpoint's answer, as text without tokens.

        Raises MissingCapability when this node may not ask, EngineRefused for a call that will never be answered,
        EngineFaulty when the attempts are spent or the answer is not one.
        """
        body = {
            "model": self._settings.model,
            "messages": [message.as_chat() for message in messages],
            "max_tokens": max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p or 1.0,
        }
        async with self._slots:
            return self._result(await self._answer(body))

    async def close(self) -> None:
        """Close the connections; a later call opens others."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _answer(self, body: Mapping[str, object]) -> Any:  # noqa: ANN401 - JSON
        attempt, wait_s = 1, self._first_wait_s
        while True:
            try:
                return await self._ask(body)
            except _Busy as busy:
                if attempt == self._settings.max_attempts:
                    raise self._faulty(f"did not answer in {attempt} attempts: {busy}") from busy
                self._count("repeated")
                log.info("external.repeated", policy_id=self._policy_id, attempt=attempt, why=str(busy))
                await asyncio.sleep(min(_MAX_WAIT_S, max(wait_s, busy.wait_s)))
                attempt, wait_s = attempt + 1, 2 * wait_s

    async def _ask(self, body: Mapping[str, object]) -> Any:  # noqa: ANN401 - JSON
        try:
            response = await post_json(
                self._connected(), "/chat/completions", body, max_bytes=_MAX_ANSWER_BYTES
            )
            status, text = response.status_code, response.text[:_SHOWN_CHARS]
            if status in _BUSY or status >= 500:
                wait_s = _seconds(response.headers.get("retry-after", ""))
                raise _Busy(f"HTTP {status}: {text}", wait_s=wait_s)
            if status != 200:
                self._refused(status, text)
            return response.json()
        except AnswerRefused as error:
            raise self._faulty(str(error)) from error
        except httpx.HTTPError as error:
            raise _Busy(f"{type(error).__name__}: {error}") from error
        except ValueError as error:
            raise _Busy(f"the answer is not JSON: {error}") from error

    def _refused(self, status: int, text: str) -> None:
        self._count("refused")
        whose = f"the endpoint of policy {self._policy_id!r}"
        if status in _NOT_ALLOWED:
            remedy = f"check --external-key-file {self._policy_id}=PATH"
            raise MissingCapability(f"{whose} refuses this node (HTTP {status}); {remedy}")
        raise EngineRefused(f"{whose} answered HTTP {status}: {text}")

    def _connected(self) -> httpx.AsyncClient:
        endpoint = self._endpoint
        if endpoint is None:
            self._count("no_endpoint")
            raise MissingCapability(
                f"policy {self._policy_id!r} is an external endpoint and this node has none for it; start it with "
                f"--external {self._policy_id}=URL"
            )
        if self._client is None:
            headers = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
            self._client = httpx.AsyncClient(
                base_url=endpoint.base_url, headers=headers, timeout=self._settings.timeout_s
            )
        return self._client

    def _result(self, answer: Any) -> GenerateResult:  # noqa: ANN401 - JSON
        try:
            choice, usage = answer["choices"][0], answer.get("usage") or {}
            text = choice["message"].get("content") or ""
            if not isinstance(text, str):
                raise TypeError(f"content is {type(text).__name__}")
            tokens = {kind: int(usage.get(f"{kind}_tokens") or 0) for kind in ("prompt", "completion")}
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise self._faulty(
                f"answered what is no chat completion: {str(answer)[:_SHOWN_CHARS]}"
            ) from error
        self._count("answered")
        for kind, count in tokens.items():
            self._metrics.increment(
                "astraflow_raas_external_tokens_total", count, policy=self._policy_id, kind=kind
            )
        return GenerateResult((), (), (), text, str(choice.get("finish_reason") or "stop"))

    def _faulty(self, problem: str) -> EngineFaulty:
        self._count("failed")
        return EngineFaulty(f"the endpoint of policy {self._policy_id!r} {problem}")

    def _count(self, outcome: str) -> None:
        self._metrics.increment(
            "astraflow_raas_external_calls_total", policy=self._policy_id, outcome=outcome
        )


def _seconds(retry_after: str) -> float:
    """The header's seconds; 0 for a date or nonsense."""
    try:
        wait_s = float(retry_after)
    except ValueError:
        return 0.0
    return wait_s if math.isfinite(wait_s) else 0.0
