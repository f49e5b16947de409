"""Channels whose calls go where their connection leads now: what its files say may change while they are open.

Invariant: a call that begins goes over a channel made of the files as they are then. Calls and streams that began
before end where they began, and the channel they use is closed after the last of them. Opened by `client`.
"""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import grpc
import grpc.aio

from astraflow.connecting.connection import Connection

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


def channel_options() -> list[tuple[str, int]]:
    """Return the channel options every AstraFlow channel uses: message bounds, and keepalive that finds
    half-open links."""
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Several daemons of one laptop talk to one server: without this they would share one connection and
        # its stream limit.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Also the time a connection may take to be made: short ones never succeed over far or busy links.
        ("grpc.min_reconnect_backoff_ms", 5_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # A server that moved is asked for by its name again; 30 s otherwise.
        ("grpc.dns_min_time_between_resolutions_ms", 2_000),
    ]


def async_channel(connection: Connection) -> grpc.aio.Channel:
    """Open a channel for asyncio, with TLS where the connection says so. Tokens are sent by the clients, not by it."""
    return cast("grpc.aio.Channel", _AsyncChannel(connection))


def blocking_channel(connection: Connection) -> grpc.Channel:
    """The same for threads."""
    return cast("grpc.Channel", _BlockingChannel(connection))


def _credentials(connection: Connection) -> grpc.ChannelCredentials | None:
    if not connection.is_secure:
        return None
    return grpc.ssl_channel_credentials(
        connection.ca or None, connection.client_key or None, connection.client_cert or None
    )


def _options(connection: Connection) -> list[tuple[str, int | str]]:
    options: list[tuple[str, int | str]] = list(channel_options())
    if connection.server_name:
        options.append(("grpc.ssl_target_name_override", connection.server_name))
    return options


class _Opened:
    """A channel of one state of the files, and how many calls use it."""

    def __init__(self, connection: Connection, module: Any) -> None:  # noqa: ANN401 - grpc or grpc.aio
        credentials, options = _credentials(connection), _options(connection)
        self.connection = connection
        self.channel = (
            module.insecure_channel(connection.address, options=options)
            if credentials is None
            else module.secure_channel(connection.address, credentials, options=options)
        )
        self.rpcs: dict[str, Callable[..., Any]] = {}
        self.in_flight = 0

    def rpc(self, rpc: "_Rpc") -> Callable[..., Any]:
        """The rpc of this channel."""
        if rpc.path not in self.rpcs:
            self.rpcs[rpc.path] = getattr(self.channel, rpc.kind)(rpc.path, *rpc.how, **rpc.named)
        return self.rpcs[rpc.path]


class _Rpc:
    """An rpc as a stub has it, which is called over the channel of the moment."""

    def __init__(self, owner: "_Channel", kind: str, path: str, *how: object, **named: object) -> None:
        self.kind, self.path, self.how, self.named = kind, path, how, named
        self._owner = owner
        self._method = path.encode()

    def __call__(self, *arguments: object, **named: object) -> Any:  # noqa: ANN401 - an answer or a call, as of grpc
        return self._owner.start(self, *arguments, **named)


class _Channel:
    """What both twins share: the part of a channel that stubs use."""

    _module: Any

    def __init__(self, connection: Connection) -> None:
        self._dialled = connection
        self._lock = threading.Lock()
        self._opened = _Opened(connection.current(), self._module)
        self._retired: list[_Opened] = []
        self._is_closed = False

    def __getattr__(self, kind: str) -> Callable[..., _Rpc]:
        if kind not in _KINDS:
            raise AttributeError(f"a channel of ours has no {kind}, only {', '.join(_KINDS)}")
        return partial(_Rpc, self, kind)

    def start(self, rpc: _Rpc, *arguments: object, **named: object) -> Any:  # noqa: ANN401 - as of `_Rpc`
        """Begin a call. Closes earlier channels that no call uses: what ends their calls is a thread that cannot.

        Raises ValueError after `close`, as grpc does.
        """
        with self._lock:
            if self._is_closed:
                raise ValueError("Cannot invoke RPC on closed channel!")
            self._follow_files()
            opened, unused = self._opened, [each for each in self._retired if not each.in_flight]
            self._retired = [each for each in self._retired if each.in_flight]
            # Under the lock: grpc crashes where an rpc is looked up in a channel that was closed.
            called = opened.rpc(rpc)
            opened.in_flight += 1
        for each in unused:
            self._close_unused(each)
        answer = None
        try:
            answer = called(*arguments, **named)
        finally:
            self._at_end_of(answer, partial(self._ended, opened))
        return answer

    def _follow_files(self) -> None:
        connection = self._dialled.current()
        if connection is not self._opened.connection:
            opened = _Opened(connection, self._module)
            self._retired.append(self._opened)
            self._opened = opened

    def _ended(self, opened: _Opened, _call: object = None) -> None:
        with self._lock:
            opened.in_flight -= 1

    def _at_end_of(self, answer: object, ended: Callable[..., None]) -> None:
        raise NotImplementedError

    def _close_unused(self, opened: _Opened) -> None:
        raise NotImplementedError

    def _all_closing(self) -> list[_Opened]:
        """Every channel; no call begins from now on."""
        with self._lock:
            self._is_closed = True
            return [*self._retired, self._opened]


class _AsyncChannel(_Channel):
    _module = grpc.aio

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._closing: set[asyncio.Task[None]] = set()

    def _at_end_of(self, answer: object, ended: Callable[..., None]) -> None:
        if isinstance(answer, grpc.aio.Call):
            answer.add_done_callback(ended)
        else:  # it did not even begin
            ended()

    def _close_unused(self, opened: _Opened) -> None:
        closing = asyncio.get_running_loop().create_task(opened.channel.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        await asyncio.gather(*self._closing, *(each.channel.close() for each in self._all_closing()))


class _BlockingChannel(_Channel):
    _module = grpc

    def _at_end_of(self, answer: object, ended: Callable[..., None]) -> None:
        if not (isinstance(answer, grpc.RpcContext) and answer.add_callback(ended)):
            ended()

    def _close_unused(self, opened: _Opened) -> None:
        opened.channel.close()

    def close(self) -> None:
        for each in self._all_closing():
            each.channel.close()
