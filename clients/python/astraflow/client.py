"""The Python client of the dataflow server, used by nodes, trainers, the launcher and by anybody's program.

`AsyncClient` and `Client` are twins: each rpc of the contract is a typed attribute call with a deadline,
typed errors (`astraflow.errors`) and retries only where the contract's `retry` option says that repeating is
harmless: while the server, or its store, does not answer, and no longer than one budget (`RetryPolicy.total_s`).
`read_all` repeats a stream that only reads; other streams are never repeated, and are the caller's to open again.

    async with AsyncClient("127.0.0.1:7070") as client:  # or a join string, or a Connection
        run = (await client.call(client.runs.GetRun, GetRunRequest())).run
        async for notice in client.stream(client.versions.Watch, WatchRequest(run_id=run.run_id)):
            ...
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf import descriptor_pool
from google.protobuf.message import Message

from astraflow import errors
from astraflow._contract.bounds import require_bounds
from astraflow._status import from_rpc_error, is_silence
from astraflow.connecting.channels import MAX_MESSAGE_BYTES, async_channel, blocking_channel, channel_options
from astraflow.connecting.compatibility import require_compatible
from astraflow.connecting.connection import Connection
from astraflow.connecting.trust import trust_problem
from astraflow.dataflow.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    batch_service_pb2_grpc,
    evaluation_service_pb2_grpc,
    run_service_pb2_grpc,
    sample_service_pb2_grpc,
    task_service_pb2_grpc,
    trajectory_service_pb2_grpc,
    version_service_pb2_grpc,
)
from astraflow.options.v1 import options_pb2
from astraflow.server.v1 import server_info_pb2

__all__ = [
    "MAX_MESSAGE_BYTES",
    "AsyncClient",
    "Client",
    "Connection",
    "RetryPolicy",
    "channel_options",
    "correlated",
    "typed_stream",
]

Request = TypeVar("Request")
Response = TypeVar("Response")
Item = TypeVar("Item")


class _PageRequest(Protocol):
    page_token: str


class _Page(Protocol):
    next_page_token: str


PageRequest = TypeVar("PageRequest", bound=_PageRequest)
Page = TypeVar("Page", bound=_Page)

DEFAULT_TIMEOUT_S = 10.0

_HARMLESS = frozenset({options_pb2.RETRY_READ, options_pb2.RETRY_IDEMPOTENT})
# Errors after which the very same request may succeed, once the other side is there again.
_REPEATABLE = (errors.UnavailableError, errors.PayloadMissingError)
_UNREACHED = (errors.UnavailableError, errors.DeadlineError)
_MIN_WAIT_S = 0.01
_correlation_id: ContextVar[str] = ContextVar("astraflow_correlation_id", default="")


@contextmanager
def correlated(correlation_id: str) -> Iterator[None]:
    """Send `correlation_id` with every call made inside the block, in this task and the tasks it starts.

    The server writes it on each log line of those calls. Raises ValueError unless it has 1 to 64 printable
    ASCII characters.
    """
    if not (0 < len(correlation_id) <= 64 and correlation_id.isascii() and correlation_id.isprintable()):
        raise ValueError(f"correlation id {correlation_id!r} must have 1 to 64 printable ASCII characters")
    before = _correlation_id.set(correlation_id)
    try:
        yield
    finally:
        _correlation_id.reset(before)


@dataclass(frozen=True)
class RetryPolicy:
    """How often, and for how long, a harmless call is repeated while the server does not answer.

    No attempt starts later than `total_s` after the first one; `math.inf` has no end. Waits double from
    `first_wait_s` up to `max_wait_s`, each shortened at random by up to half so that callers do not come back
    together. A wait that the server asks for takes their place, lengthened at random by up to half.
    """

    total_s: float = 30.0
    first_wait_s: float = 0.05
    max_wait_s: float = 2.0

    def wait_s(self, attempt: int, *, hint_s: float | None = None) -> float:
        """Return the wait after failed attempt number `attempt`, counted from 1; the server's hint wins."""
        if hint_s is not None:
            return max(_MIN_WAIT_S, hint_s) * random.uniform(1.0, 1.5)
        # The exponent is bounded because those who reconnect for hours count their attempts too.
        ceiling: float = min(self.max_wait_s, self.first_wait_s * 2 ** min(attempt - 1, 30))
        return ceiling * random.uniform(0.5, 1.0)


_ONCE = RetryPolicy(total_s=0.0)


class _Calls:
    """What both twins share: the metadata of a call, and whether and when it may be repeated."""

    def __init__(self, target: str | Path | Connection, *, retry: RetryPolicy | None) -> None:
        self._dialled = target if isinstance(target, Connection) else Connection.of(target)
        self._retry = retry or RetryPolicy()
        self._end_s = math.inf
        self.session = ""
        """Credential that JoinRun or ClaimPolicy returned, a secret: sent with every call from then on."""
        self.on_wait: Callable[[errors.AstraflowError, float], None] = lambda _error, _waited_s: None
        """Called before a call is repeated, in the thread of the call: why, and the seconds since it began."""

    @property
    def connection(self) -> Connection:
        """How the server is reached, as the files that say so are now."""
        return self._dialled.current()

    @property
    def address(self) -> str:
        """Its `HOST:PORT`."""
        return self.connection.address

    def end_within(self, seconds: float) -> None:
        """From now on no call is repeated later than `seconds` from now: whoever uses this client ends."""
        self._end_s = time.monotonic() + seconds

    def _attempts(self, call: object, retry: RetryPolicy | None, *, harmless: bool = False) -> _Attempts:
        return _Attempts(self, call, retry or self._retry, harmless=harmless or _retry_of(call) in _HARMLESS)

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        token, correlation_id = self._dialled.current_token(), _correlation_id.get()
        authorization = (("authorization", f"Bearer {token}"),) if token else ()
        correlation = (("x-correlation-id", correlation_id),) if correlation_id else ()
        session = (("astraflow-session", self.session),) if self.session else ()
        return (*authorization, *session, *correlation, *_trace_context())


def _trace_context() -> tuple[tuple[str, str], ...]:
    """W3C's `traceparent` of the span that this code runs in, where the program records any with OpenTelemetry."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return ()
    span = trace.get_current_span().get_span_context()
    header = f"00-{span.trace_id:032x}-{span.span_id:016x}-{int(span.trace_flags):02x}"
    return (("traceparent", header),) if span.is_valid else ()


class _Attempts:
    """Counts the attempts of one call and decides after each failure whether another one follows."""

    def __init__(self, calls: _Calls, call: object, policy: RetryPolicy, *, harmless: bool) -> None:
        self._calls = calls
        self._call = call
        self._policy = policy
        self._harmless = harmless
        self._started_s = time.monotonic()
        self._failed = 0

    def wait_s_after(self, error: grpc.RpcError) -> float:
        """Return the wait before the next attempt. Raises the typed error when there is none."""
        self._failed += 1
        typed = from_rpc_error(error)
        wait_s = self._policy.wait_s(self._failed, hint_s=typed.retry_after_s)
        again_s = time.monotonic() + wait_s
        in_time = again_s - self._started_s <= self._policy.total_s and again_s <= self._calls._end_s
        if in_time and self._harmless and (is_silence(error) or isinstance(typed, _REPEATABLE)):
            self._calls.on_wait(typed, again_s - wait_s - self._started_s)
            return wait_s
        raise typed from error


def _require_fitting(request: object) -> None:
    """Raise InvalidArgumentError for a message that no server takes, before its bytes are on their way."""
    if not isinstance(request, Message):
        return
    if (size_bytes := request.ByteSize()) > MAX_MESSAGE_BYTES:
        raise errors.InvalidArgumentError(
            f"the {type(request).__name__} has {size_bytes} bytes, at most {MAX_MESSAGE_BYTES}; send it in parts"
        )
    require_bounds(request)


def _retry_of(call: object) -> int:
    """Return the rpc's `retry` option, read from the contract by its method path."""
    path: bytes = call._method  # type: ignore[attr-defined]
    _, service, method = path.decode().split("/")
    return _retry_option(service, method)


_RETRY_OPTIONS: dict[tuple[str, str], int] = {}


def _retry_option(service: str, method: str) -> int:
    if (service, method) not in _RETRY_OPTIONS:
        described = descriptor_pool.Default().FindServiceByName(service).methods_by_name[method]
        _RETRY_OPTIONS[service, method] = described.GetOptions().Extensions[options_pb2.retry]
    return _RETRY_OPTIONS[service, method]


class AsyncClient(_Calls):
    """Asyncio client. Safe to share between tasks of one event loop; close it, or use it as a context
    manager."""

    def __init__(self, target: str | Path | Connection, *, retry: RetryPolicy | None = None) -> None:
        super().__init__(target, retry=retry)
        self.channel = async_channel(self._dialled)
        self.runs = run_service_pb2_grpc.RunServiceStub(self.channel)
        self.tasks = task_service_pb2_grpc.TaskServiceStub(self.channel)
        self.trajectories = trajectory_service_pb2_grpc.TrajectoryServiceStub(self.channel)
        self.batches = batch_service_pb2_grpc.BatchServiceStub(self.channel)
        self.versions = version_service_pb2_grpc.VersionServiceStub(self.channel)
        self.evaluations = evaluation_service_pb2_grpc.EvaluationServiceStub(self.channel)
        self.samples = sample_service_pb2_grpc.SampleServiceStub(self.channel)
        self.admin = admin_service_pb2_grpc.AdminServiceStub(self.channel)

    async def call(
        self,
        rpc: grpc.aio.UnaryUnaryMultiCallable[Request, Response],
        request: Request,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry: RetryPolicy | None = None,
        harmless: bool = False,
    ) -> Response:
        """Call a unary rpc with a deadline of `timeout_s` per attempt.

        Repeats it, where the contract says that this is harmless, or the caller with `harmless`, while the server or
        its store does not answer. Raises the typed error of the last attempt, InvalidArgumentError for a message above
        MAX_MESSAGE_BYTES.
        """
        _require_fitting(request)
        attempts = self._attempts(rpc, retry, harmless=harmless)
        while True:
            try:
                return await rpc(request, timeout=timeout_s, metadata=self._metadata())
            except grpc.aio.AioRpcError as error:
                wait_s = attempts.wait_s_after(error)
            await asyncio.sleep(wait_s)

    async def server_info(
        self, *, timeout_s: float = DEFAULT_TIMEOUT_S, retry: RetryPolicy | None = None
    ) -> server_info_pb2.ServerInfo:
        """Ask the server who it is; needs no token.

        Raises IncompatibleError when this client cannot talk to it, UntrustedServerError when one side does not prove
        who it is, or only one speaks TLS.
        """
        request, retry = admin_service_pb2.GetServerInfoRequest(), retry or self._retry
        try:
            answer = await self.call(self.admin.GetServerInfo, request, timeout_s=timeout_s, retry=_ONCE)
        except _UNREACHED as error:
            if problem := await asyncio.to_thread(trust_problem, self.connection):
                raise errors.UntrustedServerError(problem) from error
            if not retry.total_s:
                raise
            answer = await self.call(self.admin.GetServerInfo, request, timeout_s=timeout_s, retry=retry)
        require_compatible(answer.server, address=self.address)
        return answer.server

    def stream(
        self,
        rpc: grpc.aio.UnaryStreamMultiCallable[Request, Response],
        request: Request,
        *,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Response]:
        """Open a server-streaming rpc and return its responses; never repeated by the library.

        A failed stream raises its typed error. `timeout_s` bounds the whole stream. Closing the generator, or
        leaving the loop over it, cancels the rpc.
        """
        _require_fitting(request)
        return typed_stream(rpc(request, timeout=timeout_s, metadata=self._metadata()))

    def open(
        self,
        rpc: grpc.aio.StreamStreamMultiCallable[Request, Response],
        requests: AsyncIterator[Request] | None = None,
    ) -> grpc.aio.StreamStreamCall[Request, Response]:
        """Open a bidirectional stream and return the grpc.aio call; the caller owns it and its reconnects."""
        return rpc(requests, metadata=self._metadata())

    async def close(self) -> None:
        """Close the channel; calls in flight are cancelled."""
        await self.channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Client(_Calls):
    """Blocking twin of `AsyncClient`; safe to share between threads."""

    def __init__(self, target: str | Path | Connection, *, retry: RetryPolicy | None = None) -> None:
        super().__init__(target, retry=retry)
        self.channel = blocking_channel(self._dialled)
        self.runs = run_service_pb2_grpc.RunServiceStub(self.channel)
        self.tasks = task_service_pb2_grpc.TaskServiceStub(self.channel)
        self.trajectories = trajectory_service_pb2_grpc.TrajectoryServiceStub(self.channel)
        self.batches = batch_service_pb2_grpc.BatchServiceStub(self.channel)
        self.versions = version_service_pb2_grpc.VersionServiceStub(self.channel)
        self.evaluations = evaluation_service_pb2_grpc.EvaluationServiceStub(self.channel)
        self.samples = sample_service_pb2_grpc.SampleServiceStub(self.channel)
        self.admin = admin_service_pb2_grpc.AdminServiceStub(self.channel)

    def call(
        self,
        rpc: grpc.UnaryUnaryMultiCallable[Request, Response],
        request: Request,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry: RetryPolicy | None = None,
        harmless: bool = False,
    ) -> Response:
        """Blocking form of `AsyncClient.call`."""
        _require_fitting(request)
        attempts = self._attempts(rpc, retry, harmless=harmless)
        while True:
            try:
                return rpc(request, timeout=timeout_s, metadata=self._metadata())
            except grpc.RpcError as error:
                wait_s = attempts.wait_s_after(error)
            time.sleep(wait_s)

    def server_info(
        self, *, timeout_s: float = DEFAULT_TIMEOUT_S, retry: RetryPolicy | None = None
    ) -> server_info_pb2.ServerInfo:
        """Blocking form of `AsyncClient.server_info`."""
        request, retry = admin_service_pb2.GetServerInfoRequest(), retry or self._retry
        try:
            answer = self.call(self.admin.GetServerInfo, request, timeout_s=timeout_s, retry=_ONCE)
        except _UNREACHED as error:
            if problem := trust_problem(self.connection):
                raise errors.UntrustedServerError(problem) from error
            if not retry.total_s:
                raise
            answer = self.call(self.admin.GetServerInfo, request, timeout_s=timeout_s, retry=retry)
        require_compatible(answer.server, address=self.address)
        return answer.server

    def pages(
        self, rpc: grpc.UnaryUnaryMultiCallable[PageRequest, Page], request: PageRequest
    ) -> Iterator[Page]:
        """Call a listing rpc until its last page; advances the `page_token` of `request`."""
        while True:
            page = self.call(rpc, request)
            yield page
            request.page_token = page.next_page_token
            if not request.page_token:
                return

    def stream(
        self,
        rpc: grpc.UnaryStreamMultiCallable[Request, Response],
        request: Request,
        *,
        timeout_s: float | None = None,
    ) -> Generator[Response]:
        """Blocking form of `AsyncClient.stream`."""
        _require_fitting(request)
        return _typed_blocking_stream(rpc(request, timeout=timeout_s, metadata=self._metadata()))

    def read_all(
        self,
        rpc: grpc.UnaryStreamMultiCallable[Request, Response],
        request: Request,
        *,
        timeout_s: float,
    ) -> list[Response]:
        """All responses of a stream that only reads, each attempt within `timeout_s`; begins anew where one broke, as
        `call` does.
        """
        _require_fitting(request)
        attempts = self._attempts(rpc, None)
        while True:
            try:
                return list(rpc(request, timeout=timeout_s, metadata=self._metadata()))
            except grpc.RpcError as error:
                wait_s = attempts.wait_s_after(error)
            time.sleep(wait_s)

    def close(self) -> None:
        """Close the channel; calls in flight are cancelled."""
        self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def typed_stream(call: AsyncIterable[Item]) -> AsyncGenerator[Item]:
    """Yield the responses of a grpc.aio call; a failed one raises its typed error. Cancels the call when the
    consumer leaves."""
    try:
        async for item in call:
            yield item
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    finally:
        if isinstance(call, grpc.aio.Call):
            call.cancel()


def _typed_blocking_stream(call: grpc._CallIterator[Item]) -> Generator[Item]:
    try:
        yield from call
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
    finally:
        call.cancel()
