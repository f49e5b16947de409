"""A proxy in front of an S3 server that answers badly on request: errors, resets, silence, half and wrong answers.

Invariant: what a fault says about the request holds: it did, or did not, reach the server. A fault meets one request,
in the order of the list; requests beyond it pass. Used by the tests of the stores and of what stands on them.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

STALL_S = 1.0
"""How long a stalled answer lets its client wait; clients under test give up after less."""
_DROP_S = 0.02
_SIP_BYTES = 256
_CODES = {403: "AccessDenied", 404: "NoSuchUpload", 409: "ConditionalRequestConflict"}
_CODES |= {429: "SlowDown", 500: "InternalError", 501: "NotImplemented"}


class Fault(Enum):
    """What happens to one request instead of an answer."""

    RESET = "connection reset before the server sees the request"
    LOST = "the server does it, the connection is reset before the answer"
    STALL = "nothing happens for too long"
    LATE = "the server does it, the answer comes too late"
    CUT = "the answer ends in the middle"
    WRONG = "the answer has one wrong byte"
    SLOW = "the answer comes in drops, whole"
    GARBAGE = "the answer is a page of somebody else"
    DRIP = "the answer comes byte by byte, for as long as the client waits"
    SIP = "the request's body is taken in sips, for as long as the client sends"


@dataclass(frozen=True)
class Answer:
    """An answer as it is sent on."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


@dataclass
class StoreProxy:
    """The proxy. `only` limits faults to requests whose path contains it."""

    target: str
    faults: list[Fault | int | None] = field(default_factory=list)
    """None lets a request pass."""
    only: str = ""
    knows_ranges: bool = True
    """False hides that a range was asked for, as some caches do."""
    before_request: Callable[[int], None] = lambda number: None
    """Called with the number of each request."""
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    """Method and If-None-Match of each request."""
    url: str = ""

    def __enter__(self) -> StoreProxy:
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10)

    def next_fault(self, path: str) -> Fault | int | None:
        """The fault of this request, used up."""
        return self.faults.pop(0) if self.faults and self.only in path else None

    def forward(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Answer:
        """Send a request on and return its answer."""
        connection = http.client.HTTPConnection(urlsplit(self.target).netloc, timeout=30)
        try:
            hidden = ("expect", "connection", *(() if self.knows_ranges else ("range",)))
            passed = {name: value for name, value in headers if name.lower() not in hidden}
            connection.request(method, path, body=body, headers=passed)
            answer = connection.getresponse()
            return Answer(answer.status, answer.getheaders(), answer.read())
        finally:
            connection.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, proxy: StoreProxy) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        # Small, so that a body that is not read soon stands still at its sender.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        self.proxy = proxy
        self.ended = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def pass_on(self) -> None:
        """Answer one request: as the server does, or with a fault."""
        proxy = self.server.proxy
        fault = proxy.next_fault(self.path)
        proxy.requests.append((self.command, self.headers.get("If-None-Match")))
        proxy.before_request(len(proxy.requests))
        if fault is Fault.SIP:
            return self.sip()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if isinstance(fault, int):
            self.send(_error(fault))
        elif fault is Fault.RESET:
            self.reset()
        elif fault is Fault.STALL:
            self.stall()
        else:
            answer = proxy.forward(self.command, self.path, list(self.headers.items()), body)
            _SPOIL[fault](self, answer)
        return None

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = pass_on

    def send(self, answer: Answer, *, pieces: int = 1, missing: int = 0) -> None:
        """Send an answer, in pieces, or with `missing` bytes less than it promises."""
        self.send_response(answer.status)
        for name, value in answer.headers:
            if name.lower() not in _OWN_HEADERS or (self.command, name.lower()) == ("HEAD", "content-length"):
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(answer.body) + missing))
        self.end_headers()
        step = max(1, -(-len(answer.body) // pieces))
        for start in range(0, len(answer.body), step):
            self.wfile.write(answer.body[start : start + step])
            self.wfile.flush()
            self.server.ended.wait(0.01 if pieces > 1 else 0)

    def send_half(self, answer: Answer) -> None:
        """Promise all of an answer and send half."""
        kept = len(answer.body) // 2
        half = Answer(answer.status, answer.headers, answer.body[:kept])
        self.send(half, missing=len(answer.body) - kept + 1)
        self.reset()

    def sip(self) -> None:
        """Take a little of the request's body now and then until the client gives up."""
        while self.rfile.read(_SIP_BYTES) and not self.server.ended.wait(_DROP_S):
            pass
        self.close_connection = True

    def drip(self, answer: Answer) -> None:
        """Send an answer byte by byte until the client gives up."""
        self.send(Answer(answer.status, answer.headers, b""), missing=len(answer.body))
        with contextlib.suppress(OSError):  # the client giving up is what is waited for
            for byte in answer.body:
                self.wfile.write(bytes([byte]))
                if self.server.ended.wait(_DROP_S):
                    break
        self.close_connection = True

    def stall(self) -> None:
        """Say nothing, then reset."""
        self.server.ended.wait(STALL_S)
        self.reset()

    def reset(self) -> None:
        """End the connection with RST instead of FIN."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Faults are expected here."""


_OWN_HEADERS = frozenset({"connection", "transfer-encoding", "date", "server", "content-length"})
_SPOIL: Mapping[Fault | None, Callable[[_Handler, Answer], None]] = {
    None: _Handler.send,
    Fault.LOST: lambda handler, _: handler.reset(),
    Fault.LATE: lambda handler, _: handler.stall(),
    Fault.CUT: _Handler.send_half,
    Fault.WRONG: lambda handler, answer: handler.send(_with_a_wrong_byte(answer)),
    Fault.DRIP: _Handler.drip,
    Fault.SLOW: lambda handler, answer: handler.send(answer, pieces=8),
    Fault.GARBAGE: lambda handler, _: handler.send(Answer(200, [], b"<html>sign in to this network</html>")),
}


def _with_a_wrong_byte(answer: Answer) -> Answer:
    if not answer.body:
        return answer
    return Answer(answer.status, answer.headers, answer.body[:-1] + bytes([answer.body[-1] ^ 1]))


def _error(status: int) -> Answer:
    code = _CODES.get(status, "ServiceUnavailable")
    body = f"<Error><Code>{code}</Code><Message/></Error>".encode()
    return Answer(status, [("Content-Type", "application/xml")], body)
