"""Both halves of a bidirectional stream run to its end, with one meaning for every way it can end.

Invariant: when `converse` returns or raises, both halves are over and the call is cancelled. Used by `push`
and `worker`, which own what is said.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

import grpc

from astraflow._status import from_rpc_error

_REASON_DEADLINE_S = 2.0


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
