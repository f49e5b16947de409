"""Lifecycle services that are one loop: ended by cancelling them where they wait, or around one stream after the other.

Invariant: `stop` returns after the loop has left its last `finally`, or after its deadline; an error inside
the loop still ends the daemon, a cancellation from outside still spreads. A stream that broke is opened anew with
backoff, for as long as the server does not refuse the node; when `converse` returns or raises, both halves are over and
the call is cancelled. Base of everything in the node that runs on its own.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import grpc

from astraflow._status import from_rpc_error
from astraflow.client import AsyncClient, RetryPolicy
from astraflow.errors import AstraflowError, InternalError, RetryableError, UnauthenticatedError
from astraflow_kit.log import get_logger

log = get_logger(__name__)

_RECONNECT = RetryPolicy(first_wait_s=0.1, max_wait_s=2.0)
_LOG_EVERY = 15
"""Failed streams of which one is worth a line: one in half a minute."""
_REASON_DEADLINE_S = 2.0


class LoopService:
    """Subclasses write `_loop`; it runs until it returns, raises, or `stop` cancels it."""

    def __init__(self) -> None:
        self._loop_task: asyncio.Task[None] | None = None
        self._stopped = False

    async def start(self) -> None:
        """Nothing to bind."""

    async def run(self) -> None:
        """Run the loop. Raises its error."""
        if self._stopped:
            return
        self._loop_task = asyncio.create_task(self._loop(), name=type(self).__name__)
        try:
            await self._loop_task
        except asyncio.CancelledError:
            if not self._stopped:
                raise

    async def stop(self, *, deadline_s: float) -> None:
        """Cancel the loop and wait at most `deadline_s` for its end. Idempotent."""
        self._stopped = True
        if self._loop_task is not None and not self._loop_task.done():
            self._loop_task.cancel()
            await asyncio.wait((self._loop_task,), timeout=deadline_s)

    async def _loop(self) -> None:
        raise NotImplementedError


class StreamService(LoopService):
    """Subclasses write `_stream`; it returns when the server closed the stream, and raises when it broke."""

    _client: AsyncClient

    def __init__(self) -> None:
        super().__init__()
        self._failures = 0
        """Streams that broke since one last worked; subclasses set it back."""

    async def _loop(self) -> None:
        """One stream after the other. Raises when the server refuses the node for good: a refused token is so only
        where no file can bring another one.
        """
        while True:
            hint_s = None
            try:
                await self._stream()
                self._failures = 0
            except (RetryableError, InternalError, UnauthenticatedError) as error:
                if isinstance(error, UnauthenticatedError) and not self._client.connection.token_may_change:
                    raise
                self._failures, hint_s = self._failures + 1, error.retry_after_s
                self._stream_failed(error, report=log.info if self._failures % _LOG_EVERY == 1 else log.debug)
            await asyncio.sleep(_RECONNECT.wait_s(max(1, self._failures), hint_s=hint_s))

    async def _stream(self) -> None:
        raise NotImplementedError

    def _stream_failed(self, error: AstraflowError, *, report: Callable[..., None]) -> None:
        """Say by `report` that a stream broke."""
        raise NotImplementedError


async def converse(
    call: "grpc.aio.StreamStreamCall[Any, Any]",
    *,
    write: Coroutine[Any, Any, None],
    read: Coroutine[Any, Any, None],
) -> None:
    """Return when the server closed the stream. Raises the typed error of a stream that failed."""
    writer, reader = asyncio.create_task(write), asyncio.create_task(read)
    try:
        await asyncio.wait((writer, reader), return_when=asyncio.FIRST_COMPLETED)
        if _met_the_end(writer):
            # The write found the stream ended; only the reading half learns why.
            await asyncio.wait((reader,), timeout=_REASON_DEADLINE_S)
        elif writer.done():
            writer.result()
        if reader.done():
            reader.result()
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    finally:
        call.cancel()
        for task in (writer, reader):
            task.cancel()
        await asyncio.gather(writer, reader, return_exceptions=True)


def _met_the_end(writer: "asyncio.Task[None]") -> bool:
    return writer.done() and isinstance(writer.exception(), asyncio.InvalidStateError | grpc.aio.UsageError)
