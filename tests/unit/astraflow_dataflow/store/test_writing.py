"""What is sent to Redis: the bytes of RESP, whole, however little the kernel takes at a time."""

import asyncio
from contextlib import suppress
from pathlib import Path

import hiredis
import pytest

from astraflow_dataflow.store import writing


@pytest.mark.parametrize(
    "words",
    [
        ["SET", "key", b"x" * 5000],
        ["FCALL", "name", 1, "af:{r}:", -2, 0.25, "ü", b"", b"y" * 4096, b"z" * 9000, "end"],
    ],
)
def test_large_arguments_are_sent_as_they_are_between_what_hiredis_would_send(
    words: list[writing.Argument],
) -> None:
    parts = list(writing.packed(words))
    assert b"".join(parts) == hiredis.pack_command(tuple(words))
    large = [word for word in words if isinstance(word, bytes) and len(word) >= 4096]
    assert [part for part in parts if len(part) >= 4096] == large
    assert all(part is word for part, word in zip(parts[1::2], large, strict=False))


@pytest.mark.parametrize("sizes", [[3_000_000], [21_000] * 300, [1] * 2000, [70_000, 1, 0, 2, 900_000]])
async def test_all_parts_arrive_in_order_at_a_reader_that_is_slow(tmp_path: Path, sizes: list[int]) -> None:
    parts = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
    received, ended = bytearray(), asyncio.Event()

    async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while some := await reader.read(50_000):
            received.extend(some)
            await asyncio.sleep(0)
        ended.set()
        writer.close()

    server = await asyncio.start_unix_server(read, tmp_path / "socket")
    async with server:
        _, writer = await asyncio.open_unix_connection(tmp_path / "socket")
        await writing.write(writer, parts)
        await writing.write(writer, [b"the next command"])
        writer.close()
        await ended.wait()
    assert received == b"".join(parts) + b"the next command"


async def test_a_reader_that_goes_away_is_an_error(tmp_path: Path) -> None:
    async def leave(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_unix_server(leave, tmp_path / "socket")
    async with server:
        _, writer = await asyncio.open_unix_connection(tmp_path / "socket")

        async def push_on() -> None:
            for _ in range(100):
                await writing.write(writer, [b"x" * 1_000_000])

        with pytest.raises(OSError):  # noqa: PT011 - a broken pipe, or a reset
            await push_on()
        with suppress(OSError):
            writer.close()
            await writer.wait_closed()


async def test_nothing_is_written_to_a_connection_that_was_closed(tmp_path: Path) -> None:
    async def stay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_unix_server(stay, tmp_path / "socket")
    async with server:
        _, writer = await asyncio.open_unix_connection(tmp_path / "socket")
        writer.close()
        with pytest.raises(ConnectionResetError):
            await writing.write(writer, [b"x"])
        await writer.wait_closed()
