"""What is compared with: gRPC streams and Redis commands that move the same bytes and do nothing else.

`python -m astraflow_bench.dataflow.raw PORT` is the server: a stream that answers every message, and one that sends.
Invariant: it has the options of our servers and clients and reads no message. Called by the measurements of pushes.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil

from astraflow.client import channel_options
from astraflow_bench.dataflow.processes import Bed, running
from astraflow_bench.figures import cpu_seconds
from astraflow_kit.parent import python
from astraflow_kit.ports import free_port

_SERVICE = "bench.Raw"
_PIPELINE = 64


@dataclass(frozen=True, kw_only=True)
class RawCost:
    """Messages moved: seconds by the clock, and of the CPU of the process that serves them."""

    seconds: float
    cpu_s: float


@dataclass(frozen=True, kw_only=True)
class RawStreams:
    """A server of streams that do nothing else, calls of it, and what they move."""

    pid: int
    push: Any
    fetch: Any
    message: bytes
    count: int

    async def measure(self) -> tuple[RawCost, RawCost]:
        """Push `count` messages, each answered, and fetch as many."""
        began_s, began_cpu_s = time.perf_counter(), cpu_seconds([self.pid])
        await _pushed(self.push, self.message, self.count)
        middle_s, middle_cpu_s = time.perf_counter(), cpu_seconds([self.pid])
        async for _ in self.fetch(b"%d %d" % (self.count, len(self.message))):
            pass
        ended_s, ended_cpu_s = time.perf_counter(), cpu_seconds([self.pid])
        return (
            RawCost(seconds=middle_s - began_s, cpu_s=middle_cpu_s - began_cpu_s),
            RawCost(seconds=ended_s - middle_s, cpu_s=ended_cpu_s - middle_cpu_s),
        )


@asynccontextmanager
async def raw_streams(folder: Path, message: bytes, *, count: int) -> AsyncIterator[RawStreams]:
    """A server that has answered a tenth of `count` messages already, to warm up."""
    port = free_port()
    command = python(__name__, str(port))
    with running(command, log=folder / "raw.log") as process:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
            await asyncio.wait_for(channel.channel_ready(), 60)
            push: Any = channel.stream_stream(f"/{_SERVICE}/Push")
            fetch: Any = channel.unary_stream(f"/{_SERVICE}/Fetch")
            await _pushed(push, message, max(1, count // 10))
            yield RawStreams(pid=process.pid, push=push, fetch=fetch, message=message, count=count)


async def memory_of_streams(folder: Path, *, count: int) -> float:
    """Bytes by which the server grows for each open stream, every one on a connection of its own."""
    port = free_port()
    command = python(__name__, str(port))
    # Channels to one address share a connection otherwise.
    options = [*channel_options(), ("grpc.use_local_subchannel_pool", 1)]
    async with AsyncExitStack() as stack:
        process = psutil.Process(stack.enter_context(running(command, log=folder / "raw-streams.log")).pid)

        async def opened() -> None:
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)
            await stack.enter_async_context(channel)
            await asyncio.wait_for(channel.channel_ready(), 60)
            call: Any = channel.stream_stream(f"/{_SERVICE}/Push")()
            await call.write(b"hello")
            await call.read()
            stack.callback(call.cancel)

        await opened()
        before = process.memory_info().rss
        for _ in range(count):
            await opened()
        return (process.memory_info().rss - before) / count


async def measure_redis(bed: Bed, value: bytes, *, count: int) -> tuple[RawCost, RawCost]:
    """SET `count` values in pipelines, and GET them; they are gone afterwards."""
    names = [f"raw:{n}" for n in range(count)]
    async with bed.spending_until_synced() as stored:
        for some in _portions(names):
            bed.resp.pipeline([("SET", name, value) for name in some])
    with bed.spending() as read:
        for some in _portions(names):
            bed.resp.pipeline([("GET", name) for name in some])
    for some in _portions(names):
        bed.resp.pipeline([("UNLINK", *some)])
    return (
        RawCost(seconds=stored.seconds, cpu_s=stored.redis_s),
        RawCost(seconds=read.seconds, cpu_s=read.redis_s),
    )


def _portions(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for first in range(0, len(names), _PIPELINE):
        yield names[first : first + _PIPELINE]


async def _pushed(push: Any, message: bytes, count: int) -> None:  # noqa: ANN401 - grpc.aio's stubs have no type here
    async def messages() -> AsyncIterator[bytes]:
        for _ in range(count):
            yield message

    async for _ in push(messages()):
        pass


async def _serve(port: int) -> None:
    async def push(requests: AsyncIterator[bytes], _context: object) -> AsyncIterator[bytes]:
        async for _ in requests:
            yield b"ok"

    async def fetch(request: bytes, _context: object) -> AsyncIterator[bytes]:
        count, size = map(int, request.split())
        message = bytes(size)
        for _ in range(count):
            yield message

    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Push": grpc.stream_stream_rpc_method_handler(push),
        "Fetch": grpc.unary_stream_rpc_method_handler(fetch),
    }
    server = grpc.aio.server(options=channel_options())
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(_SERVICE, handlers)])
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
