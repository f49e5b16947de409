"""Messages between the server and the process of a run's foreign plug-ins: a JSON head and parts of plain bytes.

Invariant: nothing that is read carries code, and what the server reads is bounded before it is read. Blocking: each
side reads in a thread, with a deadline where the other side may hang. Used on both ends of a socket pair.
"""

import json
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SIZES = struct.Struct("!II")
MAX_HEAD_BYTES, MAX_BODY_BYTES = 2**20, 24 * 2**20
"""Of what the server reads; a state has 16 MiB at most. JSON is read by one call that holds up all threads."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message."""

    head: Mapping[str, Any]
    parts: Sequence[bytes] = ()


def send(sock: socket.socket, frame: Frame, *, until_s: float | None = None) -> None:
    """Write a frame. Raises TimeoutError at `until_s` of the monotonic clock, OSError when the other side is gone."""
    head = json.dumps({**frame.head, "parts": [len(part) for part in frame.parts]}).encode()
    body = b"".join(frame.parts)
    sock.settimeout(_left_s(until_s))
    sock.sendall(_SIZES.pack(len(head), len(body)) + head + body)


def receive(sock: socket.socket, *, until_s: float | None = None, is_bounded: bool = True) -> Frame:
    """Read a frame. Raises TimeoutError, EOFError at the end, ValueError for bytes that are no frame, OSError."""
    head_bytes, body_bytes = _SIZES.unpack(_read(sock, _SIZES.size, until_s))
    if is_bounded and (head_bytes > MAX_HEAD_BYTES or body_bytes > MAX_BODY_BYTES):
        raise ValueError(
            f"it answered with {head_bytes} + {body_bytes} bytes, at most {MAX_HEAD_BYTES} + {MAX_BODY_BYTES}"
        )
    head = json.loads(_read(sock, head_bytes, until_s))
    sizes = head.pop("parts")
    body = memoryview(_read(sock, body_bytes, until_s))
    if sum(sizes) != body_bytes:
        raise ValueError(f"its answer has parts of {sum(sizes)} bytes in a body of {body_bytes}")
    parts, start = list[bytes](), 0
    for size in sizes:
        parts.append(bytes(body[start : start + size]))
        start += size
    return Frame(head, parts)


def _read(sock: socket.socket, size: int, until_s: float | None) -> bytearray:
    read = bytearray(size)
    rest = memoryview(read)
    while rest:
        sock.settimeout(_left_s(until_s))
        count = sock.recv_into(rest)
        if not count:
            raise EOFError
        rest = rest[count:]
    return read


def _left_s(until_s: float | None) -> float | None:
    # Never 0, which would mean not to wait at all instead of a timeout.
    return None if until_s is None else max(0.001, until_s - time.monotonic())
