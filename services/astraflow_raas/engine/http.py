"""Client of SGLang's HTTP API, which the embedded CPU engine speaks too.

Invariant: every answer is checked before it leaves this module, sampling is never repeated, a paused engine is resumed
until it acknowledges, and new calls wait while weights are swapped, so that the prefix-cache key of a call always names
the weights it starts under. Made once per engine process; called by `batcher` and `weight_sync`.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from secrets import token_hex

from astraflow.errors import AstraflowError
from astraflow_kit.log import get_logger
from astraflow_raas.engine.answers import generate_body, is_version_number, read_answers
from astraflow_raas.engine.base import (
    Arithmetic,
    EngineDoubtful,
    EngineFaulty,
    EngineLoad,
    EngineRefused,
    EngineUnavailable,
    GenerateCall,
    Generation,
    PauseMode,
)
from astraflow_raas.engine.changed_elements import ChangedOrders, WholeLoad
from astraflow_raas.engine.load import read_load
from astraflow_raas.engine.server_info import EngineUnsuitable, ServerInfo, read_server_info
from astraflow_raas.engine.slots import EngineSlots
from astraflow_raas.engine.transport import EngineTransport, brief
from astraflow_weights.mirror.changes import ChangedElements

log = get_logger(__name__)

_HEALTH_TIMEOUT_S = 25.0
_FLUSH_TIMEOUT_S = 5.0
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
        orders: ChangedOrders | None = None,
        api_key: str = "",
        records_experts: bool = False,
    ) -> None:
        """`api_key` is that of an engine that has one; `orders` are those of the engine that was started with them;
        without, it loads whole models. Where it `records_experts`, an engine that cannot is refused.
        """
        self.base_url = base_url
        self._orders = orders
        self._records_experts = records_experts
        self.slots = EngineSlots(1)
        self.arithmetic = Arithmetic.QUANTIZED
        self._request_timeout_s = request_timeout_s
        self._swap_timeout_s = swap_timeout_s
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        """What every request carries. Secret: never logged."""
        self._transport = EngineTransport(base_url, control_timeout_s=control_timeout_s, headers=self.headers)
        self._info: ServerInfo | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._served: int | None = None
        self._cache_salt = token_hex(4)
        self._recomputed: set[int] = set()
        self._last_sent_s = -_SETTLE_S
        self._resuming: asyncio.Task[None] | None = None
        self.stopped_s = 0.0
        """How long the last swap kept calls waiting."""

    async def introduce(self) -> None:
        info = read_server_info(
            await self._transport.get("/server_info"), where=f"the engine at {self.base_url}"
        )
        if self._records_experts and not info.records_experts:
            raise EngineUnsuitable(
                f"the engine at {self.base_url} does not say which experts tokens went to, which trainer.router_replay "
                "of the recipe needs; "
                + (
                    "the CPU engine serves dense models: give --engine sglang, or leave router_replay out"
                    if info.is_embedded
                    else "start it with --enable-return-routed-experts"
                )
            )
        # One place stays free for the node's own probes, which must not wait behind long answers.
        self.slots = EngineSlots(max(1, info.slots_per_rank - 1), num_ranks=info.num_ranks)
        self.arithmetic = info.arithmetic
        self._info = info
        if info.why_whole:
            self._whole_from_now_on(info.why_whole)

    async def generate(
        self, calls: Sequence[GenerateCall], *, rank: int = 0, adapter: str = ""
    ) -> list[Generation]:
        await self._open.wait()
        sent_under, self._last_sent_s = self._served, asyncio.get_running_loop().time()
        body = generate_body(calls, cache_key=self._cache_key(), adapter=adapter)
        if self._info is not None and self._info.num_ranks > 1:
            body["routed_dp_rank"] = rank
        answers = await self._transport.post("/generate", body, timeout_s=self._request_timeout_s)
        return read_answers(
            calls, answers, sent_under=sent_under, served=self._served, recomputed=self._recomputed
        )

    async def abort(self, rids: Sequence[str]) -> None:
        for rid in rids:
            await self._transport.post_idempotent("/abort_request", {"rid": rid})

    async def swap(
        self,
        *,
        model_dir: Path,
        version: int,
        running: PauseMode = PauseMode.IN_PLACE,
        changes: ChangedElements | None = None,
    ) -> None:
        if running is PauseMode.ABORT:
            # What was computed is not believed, prefixes neither, and the version may be the same as before.
            self._cache_salt = token_hex(4)
            self._whole_from_now_on("its weights were wrong")
        ordered = await self._order(changes, model_dir, version=version)
        # What is repaired must not sample meanwhile.
        prepared = running is not PauseMode.ABORT and await self._prepare(model_dir, version)
        self._open.clear()
        began_s = asyncio.get_running_loop().time()
        try:
            # Calls that were just sent reach the scheduler before the pause does: one that it met only after the swap
            # would begin on prefixes of before, and is made again.
            await asyncio.sleep(self._last_sent_s + _SETTLE_S - asyncio.get_running_loop().time())
            await self._transport.post_idempotent("/pause_generation", {"mode": str(running)})
            if not (ordered and await self._load_changes(version)):
                await self._load(model_dir, version, prepared=prepared)
            if running is PauseMode.RETRACT and await self._forget_prefixes():
                self._recomputed.add(version)
        finally:
            # A task of its own and shielded: an engine that a cancelled or failed swap left paused would never answer
            # again. A lost answer to the pause is no sign that it is not paused.
            self._resuming = asyncio.create_task(self._resume_and_open())
            await asyncio.shield(self._resuming)
            self.stopped_s = asyncio.get_running_loop().time() - began_s

    async def load_adapter(self, name: str, folder: Path) -> None:
        body = {"lora_name": name, "lora_path": str(folder)}
        await self._transport.post("/load_lora_adapter", body, timeout_s=self._swap_timeout_s)

    async def unload_adapter(self, name: str) -> None:
        await self._transport.post(
            "/unload_lora_adapter", {"lora_name": name}, timeout_s=self._swap_timeout_s
        )

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

    def _cache_key(self) -> str:
        """Prefixes are shared only below it. An engine at a URL may hold some of a version of this number that another
        run gave it.
        """
        return f"{self._cache_salt}-{self._served}"

    async def _order(self, changes: ChangedElements | None, model_dir: Path, *, version: int) -> bool:
        """Whether an order is written that leads from what is served to the version. While the engine serves."""
        if self._orders is None or changes is None:
            return False
        if (changes.base_version, changes.version) != (self._served, version):
            log.info("engine.whole_load", reason=f"the changes are those of version {changes.base_version}")
            return False
        try:
            await asyncio.to_thread(self._orders.write, changes, model_dir=model_dir)
        except WholeLoad as error:
            log.warning("engine.whole_load", reason=str(error))
            return False
        return True

    async def _load_changes(self, version: int) -> bool:
        """Whether the engine has loaded the changed elements; if not, nobody knows its weights."""
        assert self._orders is not None
        assert self._info is not None
        body = self._orders.request(version=version, num_ranks=self._info.tp_size)
        try:
            await self._transport.post("/update_weights_from_tensor", body, timeout_s=self._swap_timeout_s)
            done = self._orders.require_done(num_ranks=self._info.tp_size)
        except (WholeLoad, AstraflowError) as error:
            self._whole_from_now_on(str(error))
            return False
        log.info("engine.changes_loaded", version=version, **done)
        return await self._served_after_update() == version

    def _whole_from_now_on(self, reason: str) -> None:
        if self._orders is not None:
            log.warning("engine.whole_loads", reason=reason, url=self.base_url)
        self._orders = None

    async def _prepare(self, model_dir: Path, version: int) -> bool:
        """Whether the engine has loaded and checked the version while it serves, so that a swap only exchanges."""
        if self._info is None or not self._info.is_embedded:
            return False  # SGLang reads a model into the tensors that it serves
        named = {"model_path": str(model_dir), "weight_version": str(version)}
        await self._transport.post("/prepare_weights", named, timeout_s=self._swap_timeout_s)
        return True

    async def _load(self, model_dir: Path, version: int, *, prepared: bool) -> None:
        # flush_cache stays off: SGLang cannot flush below running requests. The cache key of new calls names
        # the version instead, so keys and values of older weights are never reused.
        body = {"model_path": str(model_dir), "weight_version": str(version), "flush_cache": False}
        if prepared:
            body["prepared"] = True
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

    async def _forget_prefixes(self) -> bool:
        """Whether retracted calls, which keep the key they were sent under, will find no prefix of older weights."""
        if self._info is not None and (self._info.is_embedded or not self._info.keeps_prefixes):
            return True  # a swap ends all reuse there; and there is none
        try:
            # Once: the engine is paused meanwhile. SGLang refuses while calls wait, and those that it retracted do.
            await self._transport.post("/flush_cache", {}, timeout_s=_FLUSH_TIMEOUT_S)
        except AstraflowError as error:
            log.warning("engine.cache_not_flushed", message=error.message)
            return False
        return True

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
