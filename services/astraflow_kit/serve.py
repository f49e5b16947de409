"""The gRPC server of a daemon.

Invariant: every rpc passes one guard that judges the caller by metadata before it asks gRPC for a message, turns errors
into rich statuses (an unexpected one becomes INTERNAL with a correlation id, never a traceback), counts it and logs it;
rpcs that the contracts declare missing, and those that no contract has, are answered here. `__main__` modules build one
`GrpcServer` and run it as a `Service`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias
from urllib.parse import quote

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from astraflow._contract.bounds import admit
from astraflow._contract.rpcs import RpcContract
from astraflow._status import to_status
from astraflow.connecting.connection import is_loopback
from astraflow.errors import (
    AstraflowError,
    DeadlineError,
    FencedError,
    InternalError,
    InvalidArgumentError,
    PermissionError_,
    RetryableError,
    UnauthenticatedError,
)
from astraflow_kit import traces
from astraflow_kit.identity.certificates import (
    EXPIRES_SOON_S,
    RENEW,
    ServerCertificate,
    client_certificate_end,
)
from astraflow_kit.identity.gate import STRANGER, Gate, caller
from astraflow_kit.identity.open_streams import LOOK_EVERY_S, OpenStreams
from astraflow_kit.identity.refusals import Refusals
from astraflow_kit.identity.speakers import SessionKeys, speaker
from astraflow_kit.identity.tokens import Identity, refusal
from astraflow_kit.identity.verifier import RevokedElsewhere, Verifier
from astraflow_kit.ids import IdSource
from astraflow_kit.log import bind, get_logger
from astraflow_kit.metrics import Metrics
from astraflow_kit.ports import bind_failure
from astraflow_kit.rpc_contracts import Registration, served_contracts, unknown_rpc
from astraflow_kit.settings import DaemonSettings, given_up

log = get_logger(__name__)

MAX_MESSAGE_BYTES = 64 * 2**20
CORRELATION_METADATA = "x-correlation-id"
STOP_GRACE_S = 5.0
_WARN_EVERY_S = 6 * 3600.0
RETRY_AFTER_S = 0.2
"""How long callers wait after a retryable error that names no time itself."""
REQUEST_TIMEOUT_S = 120.0
"""How long the one message of a call may take to arrive: 64 MiB at 4.5 Mbit/s."""
# Statuses travel in HTTP/2 headers, which peers bound to 8 KiB, as text, escaped to three bytes for each that is
# not ASCII, and once more as details.
_MAX_ERROR_BYTES, _MAX_ESCAPED_BYTES = 2000, 3600
_MAX_NAME = 256
_LARGE_BYTES = 2**20
_GZIP = b"\x1f\x8b"
"""How it begins; no message does."""
_NOT_ESCAPED = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")
_IDENTITY_ERRORS = (UnauthenticatedError, PermissionError_, FencedError)
_OPTIONS = (
    # What is a little too large is refused in words, by `_read`; the rest by gRPC, in as few bytes as it can.
    ("grpc.max_receive_message_length", 2 * MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Compressed messages stay as they are and `_read` refuses them: 60 KB of gzip would be 60 MB here. gRPC's own
    # refusal (compression_enabled_algorithms) is faster than this process takes note of it: 88,000 calls are 106 MiB.
    ("grpc.per_message_decompression", 0),
    # Connections that say nothing end: those without handshake, and those without a call.
    ("grpc.server_handshake_timeout_ms", 20_000),
    ("grpc.max_connection_idle_ms", 300_000),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),  # idle streams are normal: clients may ping
    ("grpc.http2.max_ping_strikes", 0),
)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Messages: TypeAlias = "AsyncIterator[bytes]"
Receive: TypeAlias = "Callable[[Messages, Identity], Awaitable[object]]"


class GrpcServer:
    """Serves the registered services with health and reflection; a `Service` of the lifecycle."""

    def __init__(
        self,
        registrations: Sequence[Registration],
        *,
        settings: DaemonSettings,
        metrics: Metrics,
        run_id: str = "",
        session_keys: SessionKeys | None = None,
        refusals: Refusals | None = None,
        revoked: RevokedElsewhere = frozenset,
        port_setting: str = "grpc_port",
        share_port: bool = False,
    ) -> None:
        """`run_id` is the run that the daemon belongs to, if it does to one; `session_keys` prove as whom callers
        speak, for rpcs whose contracts ask; `refusals` remembers whose calls are refused; `revoked` returns ids of
        tokens that were revoked otherwise than by the settings' file; `port_setting` is what people call the port; with
        `share_port` other processes may listen there too. Raises SettingsError for keys or certificates that cannot be
        used.
        """
        # Unasked, a second daemon on the same port would silently take half of the calls.
        self._options = (*_OPTIONS, ("grpc.so_reuseport", int(share_port)))
        self._registrations = registrations
        self._port_setting = port_setting
        self._settings = settings
        self._metrics = metrics
        self._run_id = run_id
        self._session_keys = session_keys
        self._refusals = refusals or Refusals()
        self._verifier = Verifier(settings, revoked=revoked) if settings.token_keys_file else None
        self._streams = OpenStreams(self._verifier)
        self._certificate = ServerCertificate(settings) if settings.tls_cert_file else None
        self._client_certificate_end = client_certificate_end(settings)
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self._watching: asyncio.Task[None] | None = None
        self.address = ""
        """`host:port`, known after `start`."""
        self.services: tuple[str, ...] = ()
        """Full names of the services that it serves, likewise."""

    async def start(self) -> None:
        """Bind and serve. Raises ContractError for servicers other than their contracts, PortError for a taken
        address.
        """
        contracts = served_contracts(self._registrations)
        self.services = tuple(contracts)
        guard = _Guard(
            contracts,
            gate=Gate(
                {rpc: contract for service in contracts.values() for rpc, contract in service.items()},
                verifier=self._verifier,
                run_id=self._run_id,
                knows_peers=self._settings.tls_client_ca_file is not None,
                keys=self._session_keys,
            ),
            streams=self._streams,
            refusals=self._refusals,
            metrics=self._metrics,
        )
        self._server = grpc.aio.server(interceptors=[guard], options=self._options)
        for add, servicer in self._registrations:
            add(servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        public = [*contracts, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(public, self._server)
        self.address = self._bind(self._server)
        await self._server.start()
        self._watching = asyncio.create_task(self._watch(), name="identity")
        for name in contracts:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        log.info("server.started", address=self.address, services=list(contracts))

    async def run(self) -> None:
        """Serve until `stop`."""
        if self._server is None:
            raise RuntimeError("start the server before running it")
        await self._server.wait_for_termination()

    async def stop(self, *, deadline_s: float) -> None:
        """Refuse new rpcs, let open ones finish for at most STOP_GRACE_S, then cancel them."""
        if self._server is None:
            return
        if self._watching is not None:
            self._watching.cancel()
        await self._health.enter_graceful_shutdown()
        await self._server.stop(min(deadline_s, STOP_GRACE_S))

    async def _watch(self) -> None:
        """End streams whose token is not good any more, and say when the certificate ends."""
        warned_s = -math.inf
        while True:
            self._streams.end_those_without_token()
            self._metrics.set("astraflow_token_expiry_timestamp_seconds", self._refusals.next_end_s())
            if self._client_certificate_end is not None:
                end_s = self._client_certificate_end.current()
                self._metrics.set("astraflow_tls_client_expiry_timestamp_seconds", end_s)
            if self._certificate is not None:
                expires_s, remaining_s = (
                    self._certificate.current().expires_s,
                    self._certificate.remaining_s(),
                )
                self._metrics.set("astraflow_tls_expiry_timestamp_seconds", expires_s)
                if remaining_s < EXPIRES_SOON_S and time.monotonic() - warned_s > _WARN_EVERY_S:
                    warned_s = time.monotonic()
                    log.warning(
                        "identity.certificate_ends", days=round(remaining_s / 86_400, 1), remedy=RENEW
                    )
            await asyncio.sleep(LOOK_EVERY_S)

    def _bind(self, server: grpc.aio.Server) -> str:
        host, port = self._settings.host, self._settings.grpc_port
        target = f"[{host}]" if ":" in host else host
        try:
            if self._certificate:
                bound = server.add_secure_port(f"{target}:{port}", self._certificate.grpc_credentials())
            else:
                bound = server.add_insecure_port(f"{target}:{port}")
        except RuntimeError as error:
            raise bind_failure(host, port, setting=self._port_setting) from error
        if not is_loopback(host) and (gives_up := given_up(self._settings)):
            log.warning("server.exposed", address=f"{target}:{bound}", gives_up=gives_up)
        return f"{target}:{bound}"


_OF_SESSIONS = ("name_in_use", "session_ended")
"""What is counted by its reason too, though the caller is who it says."""


class _Guard(grpc.aio.ServerInterceptor):
    """What surrounds every rpc: correlation id, role check, error translation, metrics, log."""

    def __init__(
        self,
        contracts: Mapping[str, Mapping[str, RpcContract]],
        *,
        gate: Gate,
        streams: OpenStreams,
        refusals: Refusals,
        metrics: Metrics,
    ) -> None:
        self._services = contracts
        self._rpcs = {rpc: contract for service in contracts.values() for rpc, contract in service.items()}
        self._gate = gate
        self._streams = streams
        self._refusals = refusals
        self._metrics = metrics
        self._ids = IdSource()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        rpc = handler_call_details.method
        return self._guarded(handler, rpc=rpc) if handler is not None else self._unknown(rpc)

    def _unknown(self, rpc: str) -> Handler:
        async def refuse(request: object, context: Context) -> AsyncIterator[object]:
            # Named apart from real rpcs: callers choose the name, and each name would be a new series.
            async with self._around(context, rpc="unknown"):
                raise unknown_rpc(rpc[:_MAX_NAME], served=self._services)
            yield

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _guarded(self, handler: Handler, *, rpc: str) -> Handler:
        shape = f"{_arity(handler.request_streaming)}_{_arity(handler.response_streaming)}"
        behaviour = getattr(handler, shape)
        wrap = self._streaming if handler.response_streaming else self._unary
        # gRPC receives, whole, the message of a call that it takes for a unary one before anybody is asked.
        make = getattr(grpc, f"stream_{_arity(handler.response_streaming)}_rpc_method_handler")
        guarded: Handler = make(
            wrap(behaviour, partial(self._request, handler, rpc), rpc=rpc),
            response_serializer=handler.response_serializer,
        )
        return guarded

    def _unary(self, behaviour: Callable[..., Any], receive: Receive, *, rpc: str) -> Callable[..., Any]:
        async def call(messages: Messages, context: Context) -> object:
            async with self._around(context, rpc=rpc) as (metadata, caller):
                with traces.served(rpc, metadata.get("traceparent", "")):
                    return await behaviour(await receive(messages, caller), context)

        return call

    def _streaming(self, behaviour: Callable[..., Any], receive: Receive, *, rpc: str) -> Callable[..., Any]:
        async def call(messages: Messages, context: Context) -> AsyncIterator[object]:
            async with self._around(context, rpc=rpc) as (_, caller):
                if caller is STRANGER:
                    raise refusal(
                        "missing", f"{rpc} is a stream, which this server opens only to callers with a token"
                    )
                responses = behaviour(await receive(messages, caller), context)
                if not hasattr(responses, "__aiter__"):
                    await responses  # it writes through the context itself
                    return
                async with aclosing(responses):
                    async for response in responses:
                        yield response

        return call

    async def _request(self, handler: Handler, rpc: str, messages: Messages, caller: Identity) -> object:
        """What a servicer gets: the message, or a stream of them. Of a stranger nothing is received: its message
        counts as empty.
        """
        if handler.request_streaming:
            return (await self._received(handler, rpc, each) async for each in messages)
        return await self._received(handler, rpc, b"" if caller is STRANGER else await _only(messages, rpc))

    async def _received(self, handler: Handler, rpc: str, request: bytes) -> object:
        """A message, read by this server so that an unreadable one is refused like any other mistake, and one that
        speaks of what the token is not for.
        """
        # Read beside the event loop, which millions of elements would hold up.
        is_large = len(request) > _LARGE_BYTES
        read = partial(_read, request, handler, rpc=rpc)
        message = await asyncio.to_thread(read) if is_large else read()
        self._gate.narrow(rpc, message)  # who may not ask learns nothing of what would be right
        if isinstance(message, Message):
            await asyncio.to_thread(admit, message) if is_large else admit(message)
        return message

    @asynccontextmanager
    async def _around(
        self, context: Context, *, rpc: str
    ) -> AsyncIterator[tuple[Mapping[str, str], Identity]]:
        """The caller's metadata, and who it is."""
        metadata = {key: str(value) for key, value in context.invocation_metadata() or ()}
        correlation_id = _loggable(metadata.get(CORRELATION_METADATA, "")) or self._ids.new()
        bind(correlation_id=correlation_id)
        started_s = time.perf_counter()
        code = "CANCELLED"
        self._metrics.add("astraflow_rpcs_active", 1, rpc=rpc)
        try:
            identity = self._gate.admit(rpc, metadata)
            self._refusals.see(identity)
            await self._gate.prove(rpc, metadata)
            if rpc in self._rpcs:
                self._rpcs[rpc].require_implemented()
            with self._streams.while_good(identity):
                yield metadata, identity
            code = "OK"  # also when a request stream just ended because its caller vanished
        except grpc.aio.AbortError:
            code = "ABORTED_BY_SERVICER"
            raise
        except Exception as error:  # noqa: BLE001 - the edge of the process: every error becomes a status
            contract = self._rpcs.get(rpc)
            typed = _typed(error, rpc=rpc, contract=contract, correlation_id=correlation_id)
            code = typed.code
            why = typed.metadata.get("reason", "")
            if isinstance(error, _IDENTITY_ERRORS):
                is_known = not isinstance(error, UnauthenticatedError)
                self._refusals.note(typed, caller=_speaking() if is_known else None)
            elif why not in _OF_SESSIONS:
                why = ""
            self._metrics.increment("astraflow_rpcs_refused_total", reason=typed.reason, why=why)
            await _abort(context, typed)
        finally:
            self._metrics.add("astraflow_rpcs_active", -1, rpc=rpc)
            self._metrics.increment("astraflow_rpcs_total", rpc=rpc, code=code)
            self._metrics.observe("astraflow_rpc_seconds", time.perf_counter() - started_s, rpc=rpc)


def _speaking() -> Identity:
    """Whose call it is: the node or trainer that its session proves, else the subject of its token."""
    identity, session = caller(), speaker()
    return replace(identity, subject=f"{session.speaker} {session.name}") if session else identity


async def _only(messages: Messages, rpc: str) -> bytes:
    """The one message of a call. Raises DeadlineError, InvalidArgumentError for a call without any."""
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            return await anext(aiter(messages))
    except TimeoutError:
        raise DeadlineError(
            f"the request of {rpc} did not arrive within {REQUEST_TIMEOUT_S:g} s; send it in parts, or over a faster "
            "link"
        ) from None
    except StopAsyncIteration:
        raise InvalidArgumentError(f"a call of {rpc} ended without its request; send one message") from None


def _read(request: bytes, handler: Handler, *, rpc: str) -> object:
    """The message of a request. Raises InvalidArgumentError."""
    if len(request) > MAX_MESSAGE_BYTES:
        raise InvalidArgumentError(
            f"a request of {rpc} has {len(request)} bytes, at most {MAX_MESSAGE_BYTES}; send it in parts"
        )
    if request.startswith(_GZIP):
        raise InvalidArgumentError(
            f"a request of {rpc} is compressed with gzip; this server takes requests only as they are: turn the "
            "client's compression off"
        )
    try:
        return handler.request_deserializer(request) if handler.request_deserializer else request
    except DecodeError as error:
        raise InvalidArgumentError(
            f"{len(request)} bytes are no request of {rpc}; the caller's contract differs from this server's, or "
            "its client compresses requests"
        ) from error


def _typed(
    error: Exception, *, rpc: str, contract: RpcContract | None, correlation_id: str
) -> AstraflowError:
    """The error as the caller will see it; what must not leave this process goes to the log."""
    if isinstance(error, AstraflowError):
        log.info("rpc.refused", rpc=rpc, reason=error.reason, message=error.message)
        typed = error
    else:
        log.error("rpc.crashed", rpc=rpc, exc_info=error)
        typed = InternalError(f"{rpc} failed; its server's log has the cause under {correlation_id}")
    if contract is not None and not contract.may_answer(typed.reason):
        log.warning("rpc.undeclared_reason", rpc=rpc, reason=typed.reason)
    if isinstance(typed, RetryableError) and typed.retry_after_s is None:
        typed.retry_after_s = RETRY_AFTER_S
    typed.metadata.setdefault("correlation_id", correlation_id)
    typed.metadata.setdefault("rpc", rpc)
    return typed


async def _abort(context: Context, error: AstraflowError) -> None:
    status = to_status(error)
    status.message = status.message[:_MAX_ERROR_BYTES]  # no character has less than a byte
    while (excess := _excess_bytes(status.message)) > 0:
        status.message = status.message[: -max(1, excess // 12)]
    await context.abort_with_status(rpc_status.to_status(status))


def _excess_bytes(message: str) -> int:
    num_escaped = len(quote(message, safe=_NOT_ESCAPED))
    return max(len(message.encode()) - _MAX_ERROR_BYTES, num_escaped - _MAX_ESCAPED_BYTES)


def _loggable(correlation_id: str) -> str:
    """The caller's own id when it is short and printable, else nothing."""
    return correlation_id if len(correlation_id) <= 64 and correlation_id.isprintable() else ""


def _arity(streaming: bool) -> str:  # noqa: FBT001 - mirrors gRPC's own two flags
    return "stream" if streaming else "unary"
