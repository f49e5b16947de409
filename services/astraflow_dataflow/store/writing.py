"""How commands reach Redis: small ones as hiredis packs them, payloads straight from where they are.

redis-py packs a command into one buffer, which asyncio copies again, more than once where the kernel does not take all
of it: fresh memory of megabytes each time, 55 µs of CPU for a payload of 21 kB. Handed to the kernel where it is, it
costs 8. Invariant: a command is sent whole, or its connection is given up. Used by `store.connection`.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

import hiredis
from redis import exceptions as redis_errors

if TYPE_CHECKING:
    from redis.asyncio.connection import AbstractConnection

Argument: TypeAlias = str | bytes | int | float

_LARGE_BYTES = 4096
"""An argument that is sent from where it is."""
_BUFFERS = 512
"""Of one system call; Linux takes 1,024."""
_PIECE_BYTES = 64 * 1024
"""What asyncio holds while the kernel takes nothing."""


def writing(connection: type[AbstractConnection]) -> type[AbstractConnection]:
    """The same connection with another writer: redis-py's own takes 15 µs of CPU to pack a pushed episode of 2,048
    tokens, hiredis 4.
    """

    class Writing(connection):  # type: ignore[valid-type, misc]
        def pack_command(self, *args: Argument) -> list[bytes]:
            """Return one command as it is sent; its name may be of several words."""
            name, *rest = args
            words = [*name.split(), *rest] if isinstance(name, str) else [name, *rest]
            if any(isinstance(word, bytes) and len(word) >= _LARGE_BYTES for word in words):
                return list(packed(words))
            return [hiredis.pack_command(tuple(words))]  # type: ignore[arg-type] # its stub says one word

        def pack_commands(self, commands: Iterable[tuple[Argument, ...]]) -> list[bytes]:
            """Return several commands as they are sent."""
            return [part for command in commands for part in self.pack_command(*command)]

        async def send_packed_command(
            self,
            command: bytes | str | Iterable[bytes],
            check_health: bool = True,  # noqa: FBT001 - redis-py's own
        ) -> None:
            """Send what was packed. Raises redis-py's ConnectionError."""
            if isinstance(command, str):
                command = command.encode()
            parts = [command] if isinstance(command, bytes) else list(command)
            is_large = sum(map(len, parts)) > _PIECE_BYTES
            await super().send_packed_command([] if is_large else parts, check_health)
            if not is_large:
                return
            try:
                await write(self._writer, parts)
            except OSError as error:
                await self.disconnect(nowait=True)
                raise redis_errors.ConnectionError(
                    f"Redis is gone while it was written to: {error}"
                ) from error
            except BaseException:
                await self.disconnect(nowait=True)  # Redis waits for the rest
                raise

    return Writing


def packed(words: Iterable[Argument]) -> Iterator[bytes]:
    """Yield a command in RESP: large arguments as they are, what is between them together."""
    arguments = [_bytes_of(word) for word in words]
    between = b"*%d\r\n" % len(arguments)
    for argument in arguments:
        between += b"$%d\r\n" % len(argument)
        if len(argument) >= _LARGE_BYTES:
            yield between
            yield argument
            between = b"\r\n"
        else:
            between += argument + b"\r\n"
    yield between


async def write(writer: asyncio.StreamWriter, parts: Iterable[bytes]) -> None:
    """Write all parts and return when the kernel has them. Raises OSError, ConnectionError."""
    if writer.get_extra_info("sslcontext") is not None:  # they are enciphered first
        writer.writelines(parts)
        await writer.drain()
        return
    writer.transport.set_write_buffer_limits(high=0)
    left = deque[memoryview](memoryview(part) for part in parts)
    while left:
        if writer.transport.is_closing():  # by now its descriptor may be another's
            raise ConnectionResetError("the connection was closed")
        if writer.transport.get_write_buffer_size() == 0:
            descriptor = writer.get_extra_info("socket").fileno()
            _drop(left, _written(descriptor, list(islice(left, _BUFFERS))))
        if left:  # the kernel is full; asyncio says when it takes more
            piece = left[0][:_PIECE_BYTES]
            writer.write(piece)
            _drop(left, len(piece))
        await writer.drain()


def _written(descriptor: int, buffers: list[memoryview]) -> int:
    try:
        return os.writev(descriptor, buffers)
    except BlockingIOError:
        return 0


def _drop(left: deque[memoryview], size: int) -> None:
    """Take so many bytes off the front."""
    while left and size >= len(left[0]):
        size -= len(left.popleft())
    if size:
        left[0] = left[0][size:]


def _bytes_of(word: Argument) -> bytes:
    if isinstance(word, bytes):
        return word
    return word.encode() if isinstance(word, str) else repr(word).encode()
