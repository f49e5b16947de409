"""A policy that is a LoRA adapter in the engine of another policy's model.

Invariant: every version is loaded under a name of its own beside the one that serves, so nothing is paused, and a call
ends under the version that it began under, whose name its spans say; a version is unloaded once its last call has
ended. The process, its places and its health are the base policy's. Made by `engine_host`; what the node asks of any
`Engine`.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import token_hex

from astraflow.errors import AstraflowError
from astraflow.plugins import VersionSpan
from astraflow_kit.log import get_logger
from astraflow_raas.engine.base import (
    AdapterServer,
    EngineLoad,
    EngineUnavailable,
    GenerateCall,
    Generation,
    PauseMode,
)
from astraflow_weights.mirror.changes import ChangedElements

log = get_logger(__name__)


@dataclass(kw_only=True, eq=False)
class _Loaded:
    """One version in the engine."""

    name: str
    version: int
    rids: set[str] = field(default_factory=set)
    """Of the calls that run under it."""


class AdapterEngine:
    """The `Engine` of a policy that is an adapter of what `server` serves. Owned by one event loop."""

    def __init__(self, server: AdapterServer, *, policy_id: str) -> None:
        self._server = server
        self._policy_id = policy_id
        self.slots = server.slots
        self.arithmetic = server.arithmetic
        self._current: _Loaded | None = None
        self._unloading: set[asyncio.Task[None]] = set()

    async def introduce(self) -> None:
        self.slots, self.arithmetic = self._server.slots, self._server.arithmetic

    async def generate(self, calls: Sequence[GenerateCall], *, rank: int = 0) -> list[Generation]:
        loaded = self._current
        if loaded is None:
            raise EngineUnavailable(f"no version of policy {self._policy_id!r} is loaded")
        rids = {call.rid for call in calls}
        loaded.rids |= rids
        try:
            found = await self._server.generate(calls, rank=rank, adapter=loaded.name)
        finally:
            loaded.rids -= rids
            self._unload_if_done(loaded)
        return [_of_version(each, loaded.version) for each in found]

    async def abort(self, rids: Sequence[str]) -> None:
        await self._server.abort(rids)

    async def swap(
        self,
        *,
        model_dir: Path,
        version: int,
        running: PauseMode = PauseMode.IN_PLACE,
        changes: ChangedElements | None = None,
    ) -> None:
        # One version may be loaded twice, and by a node before this one.
        loaded = _Loaded(name=f"{self._policy_id}@{version}-{token_hex(3)}", version=version)
        await self._server.load_adapter(loaded.name, model_dir)
        before, self._current = self._current, loaded
        if before is not None:
            if running is PauseMode.ABORT:
                await self._server.abort(sorted(before.rids))
            self._unload_if_done(before)

    async def resume(self) -> None:
        await self._server.resume()

    async def served_version(self) -> int | None:
        await self._server.served_version()  # an engine that hangs does not answer
        return self._current.version if self._current else None

    async def load(self) -> EngineLoad:
        return await self._server.load()

    async def check_health(self) -> None:
        await self._server.check_health()

    async def close(self) -> None:
        """Let nothing be sampled any more; the engine goes on for others."""
        before, self._current = self._current, None
        if before is not None:
            self._unload_if_done(before)
        await asyncio.gather(*self._unloading)

    def _unload_if_done(self, loaded: _Loaded) -> None:
        if loaded is not self._current and not loaded.rids:
            task = asyncio.get_running_loop().create_task(self._unload(loaded.name))
            self._unloading.add(task)
            task.add_done_callback(self._unloading.discard)

    async def _unload(self, name: str) -> None:
        try:
            await self._server.unload_adapter(name)
        except AstraflowError as error:
            # It takes memory until the engine ends, and nobody names it any more.
            log.warning("adapter.not_unloaded", name=name, message=error.message)


def _of_version(generation: Generation, version: int) -> Generation:
    num_tokens = len(generation.token_ids)
    return replace(generation, spans=(VersionSpan(0, num_tokens, version),) if num_tokens else ())
