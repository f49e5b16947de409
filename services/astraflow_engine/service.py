"""What the HTTP paths do: commands to the worker, with deadlines, and the weight update from disk to swap.

Invariant: every call ends within its deadline, and a sequence whose caller is gone does not go on; a weight
update that fails, at whatever point, leaves the old weights serving. The only state here is the folder the
served weights came from. Called by `server.py`; knows nothing of HTTP.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from astraflow_engine.adapters import Adapter, load_adapter
from astraflow_engine.api import AbortRequest, AdapterLoad, WeightUpdate
from astraflow_engine.core import CoreStats, EngineCore
from astraflow_engine.errors import CacheInUse, EngineFault, EngineUnavailable, RequestTimeout
from astraflow_engine.model_config import ModelConfig
from astraflow_engine.requests import Completion, GenerateRequest, PauseMode, SamplingParams
from astraflow_engine.weights import Weights, load_weights
from astraflow_engine.worker import EngineWorker
from astraflow_kit.clock import Clock
from astraflow_kit.log import get_logger

log = get_logger(__name__)

T = TypeVar("T")

_COMMAND_DEADLINE_S = 60.0
_HEALTH_DEADLINE_S = 20.0
_FLUSH_POLL_S = 0.02
_LAST_ANSWERS_S = 0.5
# One pass over a long prompt takes seconds on one core; a thread silent for longer than this is stuck.
_MAX_SILENCE_S = 60.0


class EngineService:
    """One served model. Also a lifecycle service: it owns the worker's thread and fails when the thread
    does."""

    def __init__(
        self,
        worker: EngineWorker,
        config: ModelConfig,
        *,
        model_path: Path,
        request_timeout_s: float,
        clock: Clock,
    ) -> None:
        self.model_path = model_path
        """Folder of the weights that are served now."""
        self._worker = worker
        self._config = config
        self._request_timeout_s = request_timeout_s
        self._clock = clock
        self._update_lock = asyncio.Lock()
        self._prepared: tuple[tuple[Path, str], Weights] | None = None

    async def start(self) -> None:
        """Start the scheduler thread."""
        self._worker.start()

    async def run(self) -> None:
        """Return when the thread was stopped; raises EngineFault when it failed."""
        try:
            await asyncio.wrap_future(self._worker.end)
        except Exception as error:
            # Raising ends the server under its open requests: let their callers hear of it first.
            await asyncio.sleep(_LAST_ANSWERS_S)
            raise EngineFault(f"the scheduler thread failed: {error!r}") from error

    async def stop(self, *, deadline_s: float) -> None:
        """Answer what is in progress with EngineUnavailable and end the thread."""
        await asyncio.to_thread(self._worker.stop, deadline_s=deadline_s)

    async def generate(
        self, requests: Sequence[GenerateRequest], *, caller_is_gone: Awaitable[None]
    ) -> list[Completion] | None:
        """Generate all sequences, in order; None when the caller left first, and nothing goes on then.

        Raises QueueFull, InvalidRequest (rid in use), RequestTimeout, EngineFault or EngineUnavailable; the
        other sequences of the call are aborted before.
        """
        answers = asyncio.gather(*(asyncio.wrap_future(self._worker.submit(request)) for request in requests))
        gone = asyncio.ensure_future(caller_is_gone)
        either: set[asyncio.Future[Any]] = {answers, gone}
        try:
            await asyncio.wait(either, timeout=self._request_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not answers.done() and not gone.done():
                raise RequestTimeout(
                    f"not finished after {self._request_timeout_s} s; ask for fewer tokens, continue a "
                    "paused engine, or raise --request-timeout-s"
                )
            completions = answers.result() if answers.done() else None
        finally:
            gone.cancel()
            if not answers.done() or answers.cancelled() or answers.exception() is not None:
                await self._abandon(requests, answers)
        return None if completions is None else _sound(completions)

    async def pause(self, mode: PauseMode) -> None:
        """Stop drawing tokens between two passes."""
        num_ended = await self._bounded(self._worker.pause(mode))
        log.info("generation.paused", mode=mode.value, num_ended=num_ended)

    async def resume(self) -> None:
        """Draw tokens again."""
        await self.ask(EngineCore.resume)
        log.info("generation.continued")

    async def abort(self, abort: AbortRequest) -> None:
        """End what the request names; an unknown rid is no error."""
        if abort.rid or abort.abort_all:
            await self._bounded(self._worker.abort(abort.matches))

    async def flush(self, *, timeout_s: float) -> None:
        """Flush prefix reuse, waiting up to `timeout_s` for the engine to be idle. Raises CacheInUse."""
        give_up_s = self._clock.monotonic_s() + timeout_s
        while True:
            try:
                return await self.ask(EngineCore.flush)
            except CacheInUse:
                if self._clock.monotonic_s() >= give_up_s:
                    raise
            await asyncio.sleep(_FLUSH_POLL_S)

    async def prepare_weights(self, update: WeightUpdate) -> None:
        """Load and check a checkpoint for the update that follows, while the engine serves. Raises ModelError."""
        async with self._update_lock:
            self._prepared = None
            weights = await self._read(update)
            self._prepared = (update.model_path, update.weight_version), weights

    async def update_weights(self, update: WeightUpdate) -> int:
        """Load a checkpoint beside the served one, if it is not prepared, and swap between two passes; the number of
        requests it met.

        Raises ModelError or CacheInUse with the old weights still serving. Concurrent updates run one after the other.
        """
        async with self._update_lock:
            named, weights = self._prepared or (None, None)
            self._prepared = None
            if weights is None or not update.prepared or named != (update.model_path, update.weight_version):
                weights = await self._read(update)
            if update.abort_all_requests:
                await self._bounded(self._worker.abort(lambda request: True))
            num_live = await self.ask(lambda core: _swap(core, weights, update=update))
            self.model_path = update.model_path
        log.info(
            "weights.swapped",
            version=update.weight_version,
            num_live=num_live,
            model_path=str(update.model_path),
        )
        return num_live

    async def load_adapter(self, load: AdapterLoad) -> dict[str, str]:
        """Read and check an adapter while the engine serves; those that are loaded then, by name.

        Raises ModelError, InvalidRequest.
        """
        adapter = await asyncio.to_thread(load_adapter, load.path, config=self._config)
        loaded = await self.ask(lambda core: _load_adapter(core, load.name, adapter))
        log.info("adapter.loaded", name=load.name, path=str(load.path))
        return loaded

    async def unload_adapter(self, name: str) -> dict[str, str]:
        """Forget an adapter; requests that have it end with it. Raises InvalidRequest."""
        return await self.ask(lambda core: _unload_adapter(core, name))

    async def _read(self, update: WeightUpdate) -> Weights:
        return await asyncio.to_thread(load_weights, update.model_path, config=self._config)

    async def stats(self) -> CoreStats:
        """What the engine is doing."""
        return await self.ask(EngineCore.stats)

    @property
    def alive(self) -> bool:
        """Whether the scheduler thread runs and finishes passes."""
        return not self._worker.end.done() and self._worker.silent_s < _MAX_SILENCE_S

    async def prove_generating(self) -> None:
        """Draw one token when the engine is idle; a busy or paused one proves itself by answering.

        Raises EngineUnavailable or RequestTimeout.
        """
        stats = await self.stats()
        if stats.paused or stats.num_running or stats.num_waiting:
            return
        probe = GenerateRequest(
            rid=f"HEALTH_CHECK_{uuid4().hex}",
            prompt=(0,),
            params=SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True),
        )
        await self._bounded(self._worker.submit(probe), deadline_s=_HEALTH_DEADLINE_S)

    async def ask(self, run: Callable[[EngineCore], T]) -> T:
        """Run something on the core between passes."""
        return await self._bounded(self._worker.call(run))

    async def _bounded(self, answer: "Future[T]", *, deadline_s: float = _COMMAND_DEADLINE_S) -> T:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(answer), deadline_s)
        except TimeoutError as error:
            raise EngineUnavailable(
                f"the scheduler thread gave no answer within {deadline_s} s; restart the engine"
            ) from error

    async def _abandon(
        self, requests: Sequence[GenerateRequest], answers: "asyncio.Future[list[Completion]]"
    ) -> None:
        """End what still runs of one call. A stopped engine runs nothing, so its refusal is no failure
        here."""
        answers.cancel()
        # By identity: a call refused because its rid is in use must not end the request that uses it.
        own = {id(request) for request in requests}
        with suppress(EngineUnavailable):
            await self._bounded(self._worker.abort(lambda request: id(request) in own))


def _swap(core: EngineCore, weights: Weights, *, update: WeightUpdate) -> int:
    num_live = core.num_live
    core.swap(weights, version=update.weight_version, flush_cache=update.flush_cache)
    return num_live


def _load_adapter(core: EngineCore, name: str, adapter: Adapter) -> dict[str, str]:
    core.load_adapter(name, adapter)
    return core.adapters


def _unload_adapter(core: EngineCore, name: str) -> dict[str, str]:
    core.unload_adapter(name)
    return core.adapters


def _sound(completions: list[Completion]) -> list[Completion]:
    for completion in completions:
        if completion.finish.faulty:
            raise EngineFault(completion.finish.message)
    return completions
