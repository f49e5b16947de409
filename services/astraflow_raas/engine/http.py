"""Client of SGLang's HTTP API, which the embedded CPU engine speaks too.

Invariant: every answer is checked before it leaves this module (lengths, finite log-probs, spans that cover
the tokens), sampling is never repeated, and new calls wait while weights are swapped, so that the
prefix-cache key of a call always names the weights it starts under. Made once per engine process; called by
`batcher` and `weight_sync`.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeGuard

import httpx

from astraflow.plugins import VersionSpan
from astraflow_kit.log import get_logger
from astraflow_raas.engine.base import (
    EngineFaulty,
    EngineRefused,
    EngineUnavailable,
    GenerateCall,
    Generation,
)
from astraflow_raas.engine.connection_pools import ConnectionPools

log = get_logger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_CONTROL_TIMEOUT_S = 30.0
_HEALTH_TIMEOUT_S = 25.0
_SWAP_TIMEOUT_S = 600.0
# Rounding of log_softmax may leave a certain token an ulp above zero; anything more is a fault.
_LOGPROB_ROUNDING = 1e-4
_BUSY = frozenset({408, 429, 502, 503, 504})


class HttpEngine:
    """An `Engine` at a base URL."""

    def __init__(self, base_url: str, *, request_timeout_s: float = 600.0) -> None:
        self.base_url = base_url
        timeout = httpx.Timeout(request_timeout_s, connect=_CONNECT_TIMEOUT_S)
        self._pools = ConnectionPools(base_url, timeout=timeout)
        self._open = asyncio.Event()
        self._open.set()
        self._cache_key = ""
        self._closed = False

    async def generate(self, calls: Sequence[GenerateCall]) -> list[Generation]:
        await self._open.wait()
        answers = await self._post("/generate", _generate_body(calls, cache_key=self._cache_key))
        if not isinstance(answers, list) or len(answers) != len(calls):
            raise EngineFaulty(f"the engine answered {len(calls)} calls with {_brief(answers)}")
        return [_generation(call, answer) for call, answer in zip(calls, answers, strict=True)]

    async def abort(self, rids: Sequence[str]) -> None:
        for rid in rids:
            await self._post("/abort_request", {"rid": rid}, timeout_s=_CONTROL_TIMEOUT_S)

    async def swap(self, *, model_dir: Path, version: int) -> None:
        async with self._paused():
            # flush_cache stays off: SGLang cannot flush below running requests. The cache key of new calls names
            # the version instead, so keys and values of older weights are never reused.
            body = {"model_path": str(model_dir), "weight_version": str(version), "flush_cache": False}
            answer = await self._post("/update_weights_from_disk", body, timeout_s=_SWAP_TIMEOUT_S)
            if not isinstance(answer, dict) or not answer.get("success"):
                raise EngineFaulty(
                    f"the engine did not load version {version} from {model_dir}: {_brief(answer)}"
                )
            self._cache_key = str(version)

    async def resume(self) -> None:
        await self._post("/continue_generation", {"torch_empty_cache": False}, timeout_s=_CONTROL_TIMEOUT_S)

    async def served_version(self) -> int | None:
        info = await self._get("/model_info")
        version = info.get("weight_version") if isinstance(info, dict) else None
        self._cache_key = str(version)
        return int(version) if _is_number(version) else None

    async def check_health(self) -> None:
        await self._get("/health_generate", timeout_s=_HEALTH_TIMEOUT_S)

    async def close(self) -> None:
        self._closed = True
        await self._pools.close()

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        self._open.clear()
        try:
            await self._post("/pause_generation", {"mode": "in_place"}, timeout_s=_CONTROL_TIMEOUT_S)
            try:
                yield
            finally:
                # Shielded: an engine left paused by a cancelled swap would never answer again.
                await asyncio.shield(self.resume())
        finally:
            self._open.set()

    async def _get(self, path: str, *, timeout_s: float = _CONTROL_TIMEOUT_S) -> Any:  # noqa: ANN401 - JSON
        return await self._send("GET", path, timeout=httpx.Timeout(timeout_s))

    async def _post(self, path: str, body: Mapping[str, object], *, timeout_s: float | None = None) -> Any:  # noqa: ANN401
        timeout = httpx.USE_CLIENT_DEFAULT if timeout_s is None else httpx.Timeout(timeout_s)
        return await self._send("POST", path, timeout=timeout, json=body)

    async def _send(self, method: str, path: str, **request: Any) -> Any:  # noqa: ANN401 - JSON
        where = f"{method} {self.base_url}{path}"
        if self._closed:
            # The engine died: whoever still holds it learns so as from a refused connection.
            raise EngineUnavailable(f"{where}: the engine is gone, its connections are closed")
        try:
            async with self._pools.client() as client:
                response = await client.request(method, path, **request)
        except httpx.TransportError as error:
            raise EngineUnavailable(f"{where}: {type(error).__name__}: {error}") from error
        if response.status_code in _BUSY:
            raise EngineUnavailable(f"{where} answered {response.status_code}: {_brief(response.text)}")
        if response.status_code >= 500:
            raise EngineFaulty(f"{where} answered {response.status_code}: {_brief(response.text)}")
        if response.status_code >= 400:
            raise EngineRefused(f"{where} answered {response.status_code}: {_brief(response.text)}")
        return _json(response, where=where)


def _json(response: httpx.Response, *, where: str) -> Any:  # noqa: ANN401 - JSON
    if "json" not in response.headers.get("content-type", ""):
        return response.text
    try:
        return response.json()
    except ValueError as error:
        raise EngineFaulty(f"{where} answered with broken JSON: {error}") from error


def _generate_body(calls: Sequence[GenerateCall], *, cache_key: str) -> dict[str, object]:
    return {
        "rid": [call.rid for call in calls],
        "input_ids": [call.prompt_ids for call in calls],
        "sampling_params": [_sampling_params(call) for call in calls],
        "return_logprob": True,
        "extra_key": cache_key,
        "stream": False,
    }


def _sampling_params(call: GenerateCall) -> dict[str, object]:
    return {
        "max_new_tokens": call.max_new_tokens,
        "temperature": call.temperature,
        "top_p": call.top_p,
        "top_k": call.top_k or -1,
        "sampling_seed": call.seed,
        "stop_token_ids": call.stop_token_ids,
    }


def _generation(call: GenerateCall, answer: object) -> Generation:
    """Check one answer of /generate and return it. Raises EngineFaulty naming the call."""
    try:
        return _read_generation(answer)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        complaint = f"{type(error).__name__}: {error}"
        raise EngineFaulty(f"the engine's answer to call {call.rid} is unusable: {complaint}") from error


def _read_generation(answer: Any) -> Generation:  # noqa: ANN401 - JSON; every wrong shape raises
    meta = answer["meta_info"]
    token_ids = tuple(answer["output_ids"])
    pairs = meta["output_token_logprobs"] if token_ids else []
    logprobs = tuple([_logprob(pair[0]) for pair in pairs])
    if len(logprobs) != len(token_ids) or any(
        pair[1] != token for pair, token in zip(pairs, token_ids, strict=True)
    ):
        raise ValueError(f"{len(logprobs)} log-probs do not belong to the {len(token_ids)} output tokens")
    finish = meta["finish_reason"]
    if finish["type"] == "abort" and finish.get("message"):
        log.info("engine.aborted_call", rid=meta.get("id"), message=_brief(finish["message"]))
    spans = _spans(meta, num_tokens=len(token_ids))
    return Generation(token_ids=token_ids, logprobs=logprobs, spans=spans, finish_reason=str(finish["type"]))


def _logprob(value: float) -> float:
    if not math.isfinite(value) or value > _LOGPROB_ROUNDING:
        raise ValueError(f"log-prob {value!r} is not a finite number ≤ 0")
    return min(value, 0.0)


def _spans(meta: Mapping[str, Any], *, num_tokens: int) -> tuple[VersionSpan, ...]:
    if not num_tokens:
        return ()
    # SGLang omits the list only in answers that never saw an update; then one version made all tokens.
    listed = meta.get("weight_versions") or [
        {"version": meta["weight_version"], "start": 0, "end": num_tokens}
    ]
    spans = tuple(
        VersionSpan(span["start"], span["end"], _version_number(span["version"])) for span in listed
    )
    ends = [0, *(span.end for span in spans)]
    if ends[-1] != num_tokens or any(
        span.start != end or span.end <= end for span, end in zip(spans, ends, strict=False)
    ):
        raise ValueError(f"weight version spans {spans} do not cover {num_tokens} tokens")
    return spans


def _version_number(version: object) -> int:
    if not _is_number(version):
        raise ValueError(f"weight version {version!r} is not a number, so this node did not load it")
    return int(version)


def _is_number(version: object) -> TypeGuard[str]:
    return isinstance(version, str) and version.isascii() and version.isdigit()


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= 300 else f"{text[:300]}…"
