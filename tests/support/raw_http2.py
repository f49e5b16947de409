"""HTTP/2 by hand, for what no gRPC client sends: a call that is never finished, a message of gzip, half a header.

Used by tests of what a server reads of callers that it does not know.
"""

import gzip
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _AWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_PART = 16_384
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int, payload: bytes = b"", *, stream: int = 0) -> bytes:
    """One frame."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def headers(rpc: str, metadata: Mapping[str, str]) -> bytes:
    """The header block of a call, each field as a literal."""
    usual = {":method": "POST", ":scheme": "http", ":path": rpc, ":authority": "localhost", "te": "trailers"}
    return b"".join(
        b"\0" + _text(name) + _text(value)
        for name, value in {**usual, "content-type": "application/grpc", **metadata}.items()
    )


def _text(text: str) -> bytes:
    content, length = text.encode(), b""
    rest = len(content)
    if rest >= 127:
        length, rest = b"\x7f", rest - 127
        while rest >= 128:
            length, rest = length + bytes([rest % 128 + 128]), rest // 128
    return length + bytes([rest]) + content


def message(content: bytes, *, compressed: bool = False, declared: int | None = None) -> bytes:
    """A gRPC message; `declared` is the length that it claims."""
    return struct.pack(">?I", compressed, len(content) if declared is None else declared) + content


BOMB = message(gzip.compress(bytes(60 * 2**20)), compressed=True)
"""60 KB that are 60 MiB once inflated."""


HALF_A_HEADER = frame(_HEADERS, _END_HEADERS, headers("/no.Service/Call", {}), stream=1)[:40]
"""A frame that is cut: it says that more comes."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What a server made of a call: how much of it fitted into its windows, and its last headers."""

    sent_bytes: int
    trailers: bytes


class RawConnection:
    """One connection to a gRPC server without TLS."""

    def __init__(self, address: str, *, timeout_s: float = 20.0) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=timeout_s)
        self._streams = 0
        self._window = {0: 65_535}
        self._socket.sendall(PREFACE + frame(_SETTINGS, 0))

    def send(self, raw: bytes) -> None:
        """Bytes as they are."""
        self._socket.sendall(raw)

    def call(
        self, rpc: str, content: bytes, *, metadata: Mapping[str, str] | None = None, whole: bool = True
    ) -> Ended:
        """Send as much of `content` as the server takes, until it ends the call. Raises TimeoutError when it does not
        within the connection's timeout. A call that is not `whole` never says that its content has ended.
        """
        self._streams += 1
        stream, sent = 2 * self._streams - 1, 0
        self._window[stream] = 65_535
        self.send(frame(_HEADERS, _END_HEADERS, headers(rpc, metadata or {}), stream=stream))
        sent = self._send(content, 0, stream, whole=whole)
        for kind, flags, payload, of in self._frames():
            if of == stream and (kind == _RESET or (kind == _HEADERS and flags & _END_STREAM)):
                return Ended(sent_bytes=sent, trailers=payload)
            sent = self._send(content, sent, stream, whole=whole)
        raise ConnectionError("the server closed the connection")

    def wait_for_end(self) -> None:
        """Until the server closes the connection. Raises TimeoutError when it does not."""
        for _ in self._frames():
            pass

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _send(self, content: bytes, sent: int, stream: int, *, whole: bool) -> int:
        while (size := min(_PART, len(content) - sent, self._window[stream], self._window[0])) > 0:
            is_last = whole and sent + size == len(content)
            self.send(frame(_DATA, _END_STREAM if is_last else 0, content[sent : sent + size], stream=stream))
            sent += size
            self._window[stream] -= size
            self._window[0] -= size
        return sent

    def _frames(self) -> Iterator[tuple[int, int, bytes, int]]:
        buffered = b""
        while received := self._socket.recv(65_536):
            buffered += received
            while len(buffered) >= 9 and len(buffered) >= (end := 9 + int.from_bytes(buffered[:3])):
                kind, flags, stream = buffered[3], buffered[4], int.from_bytes(buffered[5:9])
                payload, buffered = buffered[9:end], buffered[end:]
                if kind == _WINDOW:
                    self._window[stream] = self._window.get(stream, 65_535) + int.from_bytes(payload)
                elif kind in (_SETTINGS, _PING) and not flags & _ACK:
                    self.send(frame(kind, _ACK, payload if kind == _PING else b""))
                yield kind, flags, payload, stream
