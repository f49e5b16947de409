"""Messages between the service and one of its workers: a header and a message of the contract.

Invariant: every call has exactly one answer with its number, unless the worker ends. Used on both ends of a socket
pair, which no other process holds.
"""

import asyncio
import struct
from dataclasses import dataclass
from enum import IntEnum

_HEADER = struct.Struct("!IQB")
MAX_FRAME_BYTES = 16 * 2**20


class Kind(IntEnum):
    """What a frame is. `READY`, `ANSWER`, `RAISED` and `MISSING` come from the worker; the last two hold text."""

    RESET = 1
    STEP = 2
    CLOSE = 3
    READY = 4
    ANSWER = 5
    RAISED = 6
    MISSING = 7


@dataclass(frozen=True, slots=True)
class Frame:
    """One message; `call` numbers a call and its answer."""

    kind: Kind
    call: int = 0
    payload: bytes = b""


async def read_frame(reader: asyncio.StreamReader) -> Frame:
    """Return the next frame. Raises EOFError at the end, ValueError for bytes that are none."""
    length, call, kind = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes, at most {MAX_FRAME_BYTES}")
    return Frame(Kind(kind), call, await reader.readexactly(length))


def write_frame(writer: asyncio.StreamWriter, frame: Frame) -> None:
    """Queue a frame."""
    writer.write(_HEADER.pack(len(frame.payload), frame.call, frame.kind) + frame.payload)
