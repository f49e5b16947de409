"""The Python client of the dataflow server, used by nodes, trainers, the launcher and by anybody's program.

`AsyncClient` and `Client` are twins: each rpc of the contract is a typed attribute call with a deadline,
typed errors (`astraflow.errors`) and retries only where the contract's `retry` option says that repeating is
harmless. Streams are returned as they are, for the caller to own; their errors are typed by `typed_stream`.

    async with AsyncClient("127.0.0.1:7070") as client:
        run = (await client.call(client.runs.GetRun, GetRunRequest())).run
        async for notice in client.stream(client.versions.Watch, WatchRequest(run_id=run.run_id)):
            ...
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

import grpc
import grpc.aio

from astraflow import errors
from astraflow._status import from_rpc_error
from astraflow.dataflow.v1 import (
    admin_service_pb2_grpc,
    batch_service_pb2_grpc,
    run_service_pb2_grpc,
    task_service_pb2_grpc,
    trajectory_service_pb2_grpc,
    version_service_pb2_grpc,
)
from astraflow.options.v1 import options_pb2

__all__ = ["AsyncClient", "Client", "RetryPolicy", "channel_options", "typed_stream"]

Request = TypeVar("Request")
Response = TypeVar("Response")
Item = TypeVar("Item")

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
DEFAULT_TIMEOUT_S = 10.0

_HARMLESS = frozenset({options_pb2.RETRY_READ, options_pb2.RETRY_IDEMPOTENT})


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
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]


@dataclass(frozen=True)
class RetryPolicy:
    """How often, and for how long, a harmless call is repeated while the server is unreachable.

    `total_s` bounds the time from the first attempt; waits double from `first_wait_s` to `max_wait_s` with
    full jitter.
    """

    total_s: float = 30.0
    first_wait_s: float = 0.05
    max_wait_s: float = 2.0

    def wait_s(self, attempt: int, *, hint_s: float | None = None) -> float:
        """Return the wait before attempt number `attempt` (1 is the first repeat); the server's hint wins."""
        if hint_s is not None:
            return hint_s
        ceiling: float = min(self.max_wait_s, self.first_wait_s * 2 ** (attempt - 1))
        return ceiling * random.uniform(0.5, 1.0)


class _Calls:
    """What both twins share: token metadata, and which rpcs may be repeated."""

    def __init__(self, token: str | None) -> None:
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()

    def may_repeat(self, call: object, error: errors.AstraflowError) -> bool:
        return (
            isinstance(error, errors.UnavailableError | errors.PayloadMissingError)
            and _retry_of(call) in _HARMLESS
        )


def _retry_of(call: object) -> int:
    """Return the rpc's `retry` option, read from the contract by its method path."""
    path = getattr(call, "_method", b"")
    name = path.decode() if isinstance(path, bytes) else str(path)
    _, service, method = name.split("/")
    return _retry_option(service, method)


_RETRY_OPTIONS: dict[tuple[str, str], int] = {}


def _retry_option(service: str, method: str) -> int:
    if (service, method) not in _RETRY_OPTIONS:
        from google.protobuf import descriptor_pool

        described = descriptor_pool.Default().FindServiceByName(service).methods_by_name[method]
        _RETRY_OPTIONS[service, method] = described.GetOptions().Extensions[options_pb2.retry]
    return _RETRY_OPTIONS[service, method]


class AsyncClient(_Calls):
    """Asyncio client. Safe to share between tasks of one event loop; close it, or use it as a context
    manager."""

    def __init__(self, address: str, *, token: str | None = None, retry: RetryPolicy | None = None) -> None:
        super().__init__(token)
        self.address = address
        self._retry = retry or RetryPolicy()
        self.channel = grpc.aio.insecure_channel(address, options=channel_options())
        self.runs = run_service_pb2_grpc.RunServiceStub(self.channel)
        self.tasks = task_service_pb2_grpc.TaskServiceStub(self.channel)
        self.trajectories = trajectory_service_pb2_grpc.TrajectoryServiceStub(self.channel)
        self.batches = batch_service_pb2_grpc.BatchServiceStub(self.channel)
        self.versions = version_service_pb2_grpc.VersionServiceStub(self.channel)
        self.admin = admin_service_pb2_grpc.AdminServiceStub(self.channel)

    async def call(
        self,
        rpc: grpc.aio.UnaryUnaryMultiCallable[Request, Response],
        request: Request,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry: RetryPolicy | None = None,
    ) -> Response:
        """Call a unary rpc with a deadline per attempt. Repeats it while the server is unreachable, where the
        contract allows.

        Raises the typed error of the last attempt.
        """
        policy = retry or self._retry
        started, attempt = time.monotonic(), 0
        while True:
            attempt += 1
            try:
                return await rpc(request, timeout=timeout_s, metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                typed = from_rpc_error(error)
                wait_s = policy.wait_s(attempt, hint_s=typed.retry_after_s)
                if not self.may_repeat(rpc, typed) or time.monotonic() + wait_s - started > policy.total_s:
                    raise typed from error
            await asyncio.sleep(wait_s)

    def stream(
        self,
        rpc: grpc.aio.UnaryStreamMultiCallable[Request, Response],
        request: Request,
        *,
        timeout_s: float | None = None,
    ) -> AsyncIterator[Response]:
        """Return the responses of a server-streaming rpc with typed errors; never repeated by the library."""
        return typed_stream(rpc(request, timeout=timeout_s, metadata=self._metadata))

    def open(
        self,
        rpc: grpc.aio.StreamStreamMultiCallable[Request, Response],
        requests: AsyncIterator[Request] | None = None,
    ) -> grpc.aio.StreamStreamCall[Request, Response]:
        """Open a bidirectional stream and return the grpc.aio call; the caller owns it and its reconnects."""
        return rpc(requests, metadata=self._metadata)

    async def close(self) -> None:
        """Close the channel; calls in flight are cancelled."""
        await self.channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Client(_Calls):
    """Blocking twin of `AsyncClient`; safe to share between threads."""

    def __init__(self, address: str, *, token: str | None = None, retry: RetryPolicy | None = None) -> None:
        super().__init__(token)
        self.address = address
        self._retry = retry or RetryPolicy()
        self.channel = grpc.insecure_channel(address, options=channel_options())
        self.runs = run_service_pb2_grpc.RunServiceStub(self.channel)
        self.tasks = task_service_pb2_grpc.TaskServiceStub(self.channel)
        self.trajectories = trajectory_service_pb2_grpc.TrajectoryServiceStub(self.channel)
        self.batches = batch_service_pb2_grpc.BatchServiceStub(self.channel)
        self.versions = version_service_pb2_grpc.VersionServiceStub(self.channel)
        self.admin = admin_service_pb2_grpc.AdminServiceStub(self.channel)

    def call(
        self,
        rpc: grpc.UnaryUnaryMultiCallable[Request, Response],
        request: Request,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry: RetryPolicy | None = None,
    ) -> Response:
        """Blocking form of `AsyncClient.call`."""
        policy = retry or self._retry
        started, attempt = time.monotonic(), 0
        while True:
            attempt += 1
            try:
                return rpc(request, timeout=timeout_s, metadata=self._metadata)
            except grpc.RpcError as error:
                typed = from_rpc_error(error)
                wait_s = policy.wait_s(attempt, hint_s=typed.retry_after_s)
                if not self.may_repeat(rpc, typed) or time.monotonic() + wait_s - started > policy.total_s:
                    raise typed from error
            time.sleep(wait_s)

    def stream(
        self,
        rpc: grpc.UnaryStreamMultiCallable[Request, Response],
        request: Request,
        *,
        timeout_s: float | None = None,
    ) -> Iterator[Response]:
        """Return the responses of a server-streaming rpc with typed errors; never repeated by the library."""
        call = rpc(request, timeout=timeout_s, metadata=self._metadata)
        try:
            yield from call
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()

    def close(self) -> None:
        """Close the channel; calls in flight are cancelled."""
        self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def typed_stream(call: AsyncIterable[Item]) -> AsyncIterator[Item]:
    """Yield a stream's items; a failed stream raises the typed error. The call is cancelled when the consumer
    leaves."""
    try:
        async for item in call:
            yield item
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    finally:
        cancel = getattr(call, "cancel", None)
        if cancel is not None:
            cancel()
