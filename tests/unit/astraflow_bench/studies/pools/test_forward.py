"""What comes to the port of every address goes to the one of loopback and back, also after nobody was there."""

from __future__ import annotations

import asyncio
import contextlib

from astraflow_bench.studies.pools import forward
from astraflow_kit.ports import free_port


async def asked(port: int) -> bytes:
    """What the other end answers to a word; nothing while it is away."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"word\n")
    answer = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    return answer


async def test_bytes_go_both_ways_and_a_target_that_is_away_costs_one_connection() -> None:
    port, target = free_port(), free_port()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.readline()).upper())
        writer.close()

    serving = asyncio.create_task(forward._serve(port, target))
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(OSError):
                assert await asked(port) == b""
                break
            await asyncio.sleep(0.01)
        async with await asyncio.start_server(answer, "127.0.0.1", target):
            assert await asked(port) == b"WORD\n"
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving
