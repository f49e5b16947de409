"""Hostile requests sent to one rpc of a server in the test's own process, and what must hold whatever they are.

No answer is INTERNAL, refused calls change nothing that the server keeps, no step of the event loop takes a second of
CPU, and memory has an end. `LoopWatch` counts CPU time of the loop's thread, the clients' work included, so that a busy
machine fails nothing. Used by the fuzz tests.
"""

import asyncio
import ctypes
import gc
import logging
import random
import re
import time
from asyncio import events
from collections import Counter
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
import grpc.aio
import psutil
import redis
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from astraflow._status import from_rpc_error
from astraflow.errors import AstraflowError
from astraflow_kit.identity.speakers import METADATA
from astraflow_kit.metrics import Metrics
from support.dataflow_world import until
from support.redis_content import redis_content
from support.request_fuzz import hostile

TOO_LONG_S = 1.0
MEMORY_BYTES = 512 * 2**20
"""What all that is sent may add to the process, which also makes it."""
_AT_ONCE = 16
_REPETITIONS = 50
"""Of a refused call during which something was written; the server settles what it accepted meanwhile."""
_PATIENCE_S = 0.25
"""A call that waits for something to happen is left then, which proves nothing and fails nothing."""
_ACTIVE = re.compile(rb"^astraflow_rpcs_active\{.*\} (\S+)$", re.MULTILINE)
_NOT_REFUSED = ("OK", "DEADLINE_EXCEEDED", "CANCELLED")


def _held_bytes(process: psutil.Process) -> int:
    """Memory that is in use: what is free again goes back to the system first, where its C library can do that."""
    gc.collect()
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return int(process.memory_info().rss)


@contextmanager
def _uncaptured() -> Iterator[None]:
    """pytest keeps every record of a test; those of 100,000 refusals would be what takes memory and collection."""
    root = logging.getLogger()
    keeping = [handler for handler in root.handlers if type(handler).__module__.startswith("_pytest.")]
    for handler in keeping:
        root.removeHandler(handler)
    try:
        yield
    finally:
        for handler in keeping:
            root.addHandler(handler)


@dataclass
class LoopWatch:
    """The longest step of event loops in this process."""

    longest_s: float = 0.0
    what: str = ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time every callback meanwhile; what other tests left is not collected in one of them."""
        run = events.Handle._run
        gc.collect()
        gc.freeze()

        def timed(handle: Any) -> None:
            began_s = time.thread_time()
            run(handle)
            took_s = time.thread_time() - began_s
            if took_s > self.longest_s:
                self.longest_s, self.what = took_s, repr(handle)

        events.Handle._run = timed  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            events.Handle._run = run  # type: ignore[method-assign]
            gc.unfreeze()


class KeptState:
    """What the Redis of a server holds, compared at the price of one command while nothing is written."""

    def __init__(self, url: str) -> None:
        self._url, self._client = url, redis.Redis.from_url(url)
        self._writes, self._content = self._count(), redis_content(url)

    def changed(self) -> list[str]:
        """The keys that were changed since the last time, but for the server's pulse."""
        writes = self._count()
        if writes == self._writes:
            return []
        before, self._writes, self._content = self._content, writes, redis_content(self._url)
        keys = sorted(before.keys() | self._content.keys())
        return [key for key in keys if before.get(key) != self._content.get(key)]

    def close(self) -> None:
        """Disconnect."""
        self._client.close()

    def _count(self) -> object:
        return self._client.info("persistence")["rdb_changes_since_last_save"]


@dataclass(kw_only=True)
class Attack:
    """One rpc, requests that it takes, and what a stream of them begins with."""

    channel: grpc.aio.Channel
    method: MethodDescriptor
    good: Sequence[Message]
    metrics: Metrics
    seed: int
    credential: str = ""
    """Of the node or trainer as which all calls speak."""
    opening: Sequence[Message] = ()
    found: Counter[str] = field(default_factory=Counter)
    last: str = "OK"

    async def run(self, count: int, *, serially: int, kept: KeptState | None = None) -> Counter[str]:
        """Send them; the first `serially` one by one, each refused one held against what is kept.

        Returns how many had which answer. Raises AssertionError, naming the number of the request.
        """
        watch, process = LoopWatch(), psutil.Process()
        with watch.watching(), _uncaptured():
            for number in range(min(serially, count)):
                await self._alone(number, kept)
            memory_bytes = _held_bytes(process)
            rest = iter(range(min(serially, count), count))
            await asyncio.gather(*(self._several(rest) for _ in range(_AT_ONCE)))
        grown_bytes = _held_bytes(process) - memory_bytes
        assert watch.longest_s < TOO_LONG_S, (
            f"the loop stood {watch.longest_s:.2f} CPU s still in {watch.what}"
        )
        assert grown_bytes < MEMORY_BYTES, f"the process has {grown_bytes >> 20} MiB more"
        return self.found

    async def _several(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            await self._send(number)

    async def _alone(self, number: int, kept: KeptState | None) -> None:
        if kept is None:
            await self._send(number)
            return
        # What an accepted call set going may write later, during another one; a call that writes does so each time.
        changes: list[list[str]] = []
        while len(changes) < _REPETITIONS and all(changes):
            if self.last in _NOT_REFUSED:  # the server may still be at it
                await self._is_quiet()
            kept.changed()
            if await self._send(number, opens=False) in _NOT_REFUSED:
                return
            changes.append(kept.changed())
        assert not all(changes), f"{self._name(number)} is refused and changes what is kept: {changes[-1]}"

    async def _is_quiet(self) -> None:
        async def nothing_runs() -> bool:
            return not sum(map(float, _ACTIVE.findall(self.metrics.render())))

        await until(nothing_runs)

    async def _send(self, number: int, *, opens: bool = True) -> str:
        """`opens` lets most streams begin with what is taken, which may change what is kept."""
        draw = random.Random(f"{self.seed} {self.method.full_name} {number}")
        content = hostile(draw.choice(self.good), draw)
        is_opened = draw.random() < 0.8 and opens
        opening = [message.SerializeToString() for message in self.opening] if is_opened else []
        error = await refusal(self._answer([*opening, content]))
        for _ in range(
            20
        ):  # a write after the stream's end, by which the client's library hides how it ended
            if error is None or "Internal error from Core" not in error.message:
                break
            error = await refusal(self._answer([*opening, content]))
        answer = "OK" if error is None else error.reason
        self.found[answer] += 1
        self.last = answer
        assert error is None or error.code not in ("INTERNAL", "UNKNOWN"), (
            f"{self._name(number)} answers {error.code}: {error.message}; sent {content[:200].hex()}"
        )
        return answer

    async def _answer(self, contents: Sequence[bytes]) -> None:
        method, channel = self.method, cast("Any", self.channel)  # bytes travel as they are
        path = f"/{method.containing_service.full_name}/{method.name}"
        how = {"timeout": _PATIENCE_S, "metadata": [(METADATA, self.credential)] if self.credential else []}
        if method.client_streaming:
            async for _ in channel.stream_stream(path)(iter(contents), **how):
                pass
        elif method.server_streaming:
            call = channel.unary_stream(path)(contents[-1], **how)
            await call.read()
            call.cancel()
        else:
            await channel.unary_unary(path)(contents[-1], **how)

    def _name(self, number: int) -> str:
        return f"{self.method.full_name}, seed {self.seed}, request {number}"


async def refusal(call: Awaitable[object]) -> AstraflowError | None:
    """The typed error of a call; None when it has an answer."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        typed: AstraflowError = from_rpc_error(error)
        return typed
    return None
