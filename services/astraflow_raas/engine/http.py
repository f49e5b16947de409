"""Client of SGLang's HTTP API, which the embedded CPU engine speaks too.

Invariant: every answer is checked before it leaves this module, sampling is never repeated, a paused engine is resumed
until it acknowledges, and new calls wait while weights are swapped, so that the prefix-cache key of a call always names
the weights it starts under. Made once per engine process; called by `batcher` and `weight_sync`.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from astraflow.errors import AstraflowError
from astraflow_raas.engine.answers import generate_body, is_version_number, read_answers
from astraflow_raas.engine.base import (
    EngineDoubtful,
    EngineFaulty,
    EngineLoad,
    EngineRefused,
    EngineUnavailable,
    GenerateCall,
    Generation,
)
from astraflow_raas.engine.load import read_load
from astraflow_raas.engine.server_info import ServerInfo, read_server_info
from astraflow_raas.engine.slots import EngineSlots
from astraflow_raas.engine.transport import EngineTransport, brief

_HEALTH_TIMEOUT_S = 25.0
_LOAD_TIMEOUT_S = 2.0
_SETTLE_S = 0.1
_RESUME = {"torch_empty_cache": False}


class HttpEngine:
    """An `Engine` at a base URL."""

    def __init__(
        self,
        base_url: str,
        *,
        request_timeout_s: float = 600.0,
        swap_timeout_s: float = 120.0,
        control_timeout_s: float = 30.0,
    ) -> None:
        self.base_url = base_url
        self.slots = EngineSlots(1)
        self._request_timeout_s = request_timeout_s
        self._swap_timeout_s = swap_timeout_s
        self._transport = EngineTransport(base_url, control_timeout_s=control_timeout_s)
        self._info: ServerInfo | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._served: int | None = None
        self._last_sent_s = -_SETTLE_S
        self._resuming: asyncio.Task[None] | None = None

    async def introduce(self) -> None:
        info = read_server_info(
            await self._transport.get("/server_info"), where=f"the engine at {self.base_url}"
        )
        # One place stays free for the node's own probes, which must not wait behind long answers.
        self.slots = EngineSlots(max(1, info.slots_per_rank - 1), num_ranks=info.num_ranks)
        self._info = info

    async def generate(self, calls: Sequence[GenerateCall], *, rank: int = 0) -> list[Generation]:
        await self._open.wait()
        sent_under, self._last_sent_s = self._served, asyncio.get_running_loop().time()
        body = generate_body(calls, cache_key=str(sent_under))
        if self._info is not None and self._info.num_ranks > 1:
            body["routed_dp_rank"] = rank
        answers = await self._transport.post("/generate", body, timeout_s=self._request_timeout_s)
        return read_answers(calls, answers, sent_under=sent_under, served=self._served)

    async def abort(self, rids: Sequence[str]) -> None:
        for rid in rids:
            await self._transport.post_idempotent("/abort_request", {"rid": rid})

    async def swap(self, *, model_dir: Path, version: int) -> None:
        self._open.clear()
        try:
            # Calls that were just sent reach the scheduler before the pause does: one that it met only after the swap
            # would begin on prefixes of before, and is made again.
            await asyncio.sleep(self._last_sent_s + _SETTLE_S - asyncio.get_running_loop().time())
            await self._transport.post_idempotent("/pause_generation", {"mode": "in_place"})
            await self._load(model_dir, version)
        finally:
            # A task of its own and shielded: an engine that a cancelled or failed swap left paused would never answer
            # again. A lost answer to the pause is no sign that it is not paused.
            self._resuming = asyncio.create_task(self._resume_and_open())
            await asyncio.shield(self._resuming)

    async def resume(self) -> None:
        await self._transport.post_until_acknowledged("/continue_generation", _RESUME)

    async def served_version(self) -> int | None:
        info = await self._transport.get("/model_info")
        version = info.get("weight_version") if isinstance(info, dict) else None
        self._served = int(version) if is_version_number(version) else None
        return self._served

    async def load(self) -> EngineLoad:
        answer = await self._transport.get_once("/v1/loads?include=core", timeout_s=_LOAD_TIMEOUT_S)
        return read_load(answer, where=f"the engine at {self.base_url}")

    async def check_health(self) -> None:
        # Sent once: whoever asks has an idea of its own how often to ask.
        await self._transport.get_once("/health_generate", timeout_s=_HEALTH_TIMEOUT_S)

    async def close(self) -> None:
        await self._transport.close()

    async def _load(self, model_dir: Path, version: int) -> None:
        # flush_cache stays off: SGLang cannot flush below running requests. The cache key of new calls names
        # the version instead, so keys and values of older weights are never reused.
        body = {"model_path": str(model_dir), "weight_version": str(version), "flush_cache": False}
        what = f"version {version} from {model_dir}"
        try:
            answer = await self._transport.post(
                "/update_weights_from_disk", body, timeout_s=self._swap_timeout_s
            )
        except EngineRefused as error:
            if self._info is not None and self._info.is_embedded:
                raise
            # SGLang "rolls back" by reading the same folder once more, so it may hold part of the new weights.
            raise EngineDoubtful(f"the engine refused {what}: {error.message}") from error
        except EngineFaulty as error:
            raise EngineDoubtful(f"the engine did not load {what}: {error.message}") from error
        except EngineUnavailable as error:
            # The answer may be lost and the update not; the version tells.
            answer = {"success": True, "message": error.message}
        if not isinstance(answer, dict) or not answer.get("success"):
            raise EngineDoubtful(f"the engine did not load {what}: {brief(answer)}")
        served = await self._served_after_update()
        if served != version:
            raise EngineDoubtful(
                f"the engine was given {what} and serves version {served}: {brief(answer.get('message'))}"
            )

    async def _served_after_update(self) -> int | None:
        try:
            return await self.served_version()
        except AstraflowError as error:
            raise EngineDoubtful(
                f"the engine does not say what it serves after an update: {error.message}"
            ) from error

    async def _resume_and_open(self) -> None:
        try:
            await self.resume()
        except EngineUnavailable as error:
            raise EngineDoubtful(f"the engine may still be paused: {error.message}") from error
        finally:
            self._open.set()
