"""A server that speaks just enough of Redis's protocol to be asked who it is: for servers nobody installs any more.

Used by integration tests.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager


@asynccontextmanager
async def fake_redis(info: Mapping[str, str]) -> AsyncIterator[str]:
    """A server whose INFO says `info` and whose every other answer is OK; its URL."""
    text = "".join(f"{name}:{value}\r\n" for name, value in info.items())

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while command := await _command(reader):
            answers = {"INFO": f"${len(text)}\r\n{text}\r\n", "PING": "+PONG\r\n"}
            writer.write(answers.get(command[0].upper(), "+OK\r\n").encode())
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"


async def _command(reader: asyncio.StreamReader) -> list[str]:
    """One command as an array of bulk strings; empty at the end of the connection."""
    head = await reader.readline()
    if not head:
        return []
    words = []
    for _ in range(int(head[1:])):
        length = int((await reader.readline())[1:])
        words.append((await reader.readexactly(length + 2))[:-2].decode())
    return words
