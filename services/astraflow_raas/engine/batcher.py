"""Joins calls that wait at the same moment into one engine request.

Invariant: a call waits only for a place in an engine or for calls with the same key, and never for a timer: what is
queued is sent in the next turn of the loop, unless `max_requests` of that key are in flight: then it waits for the
first answer, or until calls for 512 tokens have queued up. An HTTP request costs milliseconds on both sides, as much
as a short call itself, so hundreds of short calls share a few requests; a cancelled call is aborted in the engine and
the others go on. Called by `served_policy`.
"""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from astraflow.errors import AstraflowError
from astraflow_kit.log import get_logger
from astraflow_raas.engine.base import Engine, EngineRefused, GenerateCall, Generation
from astraflow_raas.engine.replicas import Places, Replicas

log = get_logger(__name__)

_ENOUGH_TOKENS = 512
"""Calls that ask for as many are worth a request of their own: while they were held, places would be empty."""


@dataclass(slots=True, eq=False)
class _Pending:
    call: GenerateCall
    answer: asyncio.Future[Generation]


class CallBatcher:
    """Sends calls to the engines that have places for them. Owned by one event loop.

    `max_requests` bounds the requests in flight of one key: more of them means less waiting for neighbours,
    fewer means less overhead per call.
    """

    def __init__(self, replicas: Replicas, *, max_requests: int) -> None:
        self._replicas = replicas
        self._max_requests = max_requests
        self._in_flight: Counter[Hashable] = Counter()
        self._queues: dict[Hashable, list[_Pending]] = {}
        self._background: set[asyncio.Task[None]] = set()

    async def generate(self, call: GenerateCall, *, key: Hashable) -> Generation:
        """Sample `call`, sharing a request with calls of the same `key`. Raises what `Engine.generate`
        raises."""
        loop = asyncio.get_running_loop()
        pending = _Pending(call, loop.create_future())
        queue = self._queues.setdefault(key, [])
        queue.append(pending)
        if len(queue) == 1 or _is_enough(queue):
            loop.call_soon(self._send, key)
        return await pending.answer

    async def close(self) -> None:
        """Cancel what is in flight; callers still waiting are cancelled too."""
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    def _send(self, key: Hashable) -> None:
        if self._in_flight[key] >= self._max_requests and not _is_enough(self._queues.get(key, ())):
            return
        batch = [pending for pending in self._queues.pop(key, []) if not pending.answer.done()]
        if batch:
            self._in_flight[key] += 1
            self._spawn(self._counted(batch, key=key))

    async def _counted(self, batch: Sequence[_Pending], *, key: Hashable) -> None:
        try:
            await self._request(batch)
        finally:
            self._in_flight[key] -= 1
            if not self._in_flight[key]:
                del self._in_flight[key]
            self._send(key)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _request(self, batch: Sequence[_Pending]) -> None:
        """Send `batch`, in as many requests as there are places for it one after the other."""
        waiting, sent = list(batch), list[asyncio.Task[None]]()
        try:
            while waiting:
                places = await self._replicas.take(partial(_num_wanted, waiting))
                sent.append(self._spawn(self._ask(places, waiting[: places.number])))
                del waiting[: places.number]
            await asyncio.gather(*sent)
        except AstraflowError as error:
            _fail(waiting, error)
        except asyncio.CancelledError:
            for pending in batch:
                pending.answer.cancel()
            raise

    async def _ask(self, places: Places, batch: Sequence[_Pending]) -> None:
        if not batch:
            return
        try:
            for pending in batch:
                self._abort_when_cancelled(pending, engine=places.engine)
            answers = await places.engine.generate([pending.call for pending in batch], rank=places.rank)
        except EngineRefused as error:
            self._refused(batch, error)
        except AstraflowError as error:
            _fail(batch, error)
        else:
            places.replica.answered()
            for pending, answer in zip(batch, answers, strict=True):
                if not pending.answer.done():
                    pending.answer.set_result(answer)
        finally:
            self._replicas.give_back(places)

    def _refused(self, batch: Sequence[_Pending], error: EngineRefused) -> None:
        """Nothing was sampled: find the culprit by sending each call alone, so that the others do not pay for
        it."""
        if len(batch) == 1:
            _fail(batch, error)
            return
        for pending in batch:
            if not pending.answer.done():
                self._spawn(self._request([pending]))

    def _abort_when_cancelled(self, pending: _Pending, *, engine: Engine) -> None:
        def abort(answer: asyncio.Future[Generation]) -> None:
            if answer.cancelled():
                self._spawn(_abort(engine, pending.call.rid))

        pending.answer.add_done_callback(abort)


async def _abort(engine: Engine, rid: str) -> None:
    try:
        await engine.abort([rid])
    except AstraflowError as error:
        # The call ends by its own bound; only engine time is lost.
        log.info("engine.abort_failed", rid=rid, message=error.message)


def _is_enough(queue: Sequence[_Pending]) -> bool:
    return sum(pending.call.max_new_tokens for pending in queue) >= _ENOUGH_TOKENS


def _num_wanted(waiting: list[_Pending]) -> int:
    """How many calls still wait; those that nobody waits for any more are dropped."""
    waiting[:] = [pending for pending in waiting if not pending.answer.done()]
    return len(waiting)


def _fail(batch: Sequence[_Pending], error: AstraflowError) -> None:
    for pending in batch:
        if not pending.answer.done():
            # One exception object per caller: a shared one would collect the tracebacks of all.
            pending.answer.set_exception(type(error)(error.message, metadata=error.metadata))
