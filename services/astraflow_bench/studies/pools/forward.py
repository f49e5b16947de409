"""Carries connections from a port of every address to one of loopback: `python -m …pools.forward PORT TARGET`.

For a network namespace with nobody in it but the run: what listens on loopback is reached over its links.
Started by `regions`.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

_CHUNK = 2**16


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):  # the other end has gone: so does this one
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
    writer.close()


async def _serve(port: int, target: int) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inside, out = await asyncio.open_connection("127.0.0.1", target)
        except OSError:  # nobody listens yet: callers dial again
            writer.close()
            return
        await asyncio.gather(_carry(reader, out), _carry(inside, writer))

    async with await asyncio.start_server(connected, "0.0.0.0", port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), int(sys.argv[2])))
