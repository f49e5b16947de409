"""A real grpc.aio server with a small service of its own: roles, errors, health, reflection, taken ports."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from astraflow import errors
from astraflow._contract.rpcs import ContractError
from astraflow._status import from_rpc_error
from astraflow.options.v1 import options_pb2
from astraflow_kit import log, ports, serve
from astraflow_kit.identity.gate import caller
from astraflow_kit.metrics import Metrics
from astraflow_kit.rpc_contracts import Registration
from astraflow_kit.settings import DaemonSettings, load
from support.certificates import self_signed
from support.raw_http2 import HALF_A_HEADER, RawConnection, message
from support.tokens import keys_file, token

pytestmark = pytest.mark.slow

ECHO = "astraflow_kit_test.v1.EchoService"
NAKED = "astraflow_kit_test.v1.NakedService"
LATER = "astraflow_kit_test.v1.LaterService"
TOKENS = {"node": "rollout", "boss": "operator", "clerk": "viewer"}


_CONTRACT = """
name: "astraflow_kit_test/v1/echo_service.proto" package: "astraflow_kit_test.v1" syntax: "proto3"
dependency: ["google/protobuf/wrappers.proto", "astraflow/options/v1/options.proto"]
service { name: "EchoService" method { name: "Echo" } method { name: "Chat" } }
service { name: "LaterService" method { name: "Echo" } method { name: "Chat" } }
service { name: "NakedService" method { name: "Echo" } }
"""


def _build_contract() -> None:
    file = text_format.Parse(_CONTRACT, descriptor_pb2.FileDescriptorProto())
    for service in file.service:
        for method in service.method:
            method.input_type = method.output_type = ".google.protobuf.StringValue"
            method.server_streaming = method.client_streaming = method.name == "Chat"
            if service.name != "NakedService":
                method.options.Extensions[options_pb2.roles].append(options_pb2.ROLE_OPERATOR)
                method.options.Extensions[options_pb2.retry] = options_pb2.RETRY_READ
                method.options.Extensions[options_pb2.scope] = options_pb2.SCOPE_NO_RUN
            if service.name == "LaterService":
                missing = method.options.Extensions[options_pb2.missing]
                missing.capability, missing.instead = "later", "call EchoService until then"
    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())


Channel = grpc.aio.Channel
_build_contract()
_READ, _WRITE = StringValue.FromString, StringValue.SerializeToString
_CODEC: dict[str, Any] = {"request_deserializer": _READ, "response_serializer": _WRITE}
_CLIENT_CODEC: dict[str, Any] = {"request_serializer": _WRITE, "response_deserializer": _READ}


FAILURES: dict[str, Exception] = {
    "fenced": errors.FencedError("epoch 3 is older than 4; claim again", metadata={"epoch": "4"}),
    "full": errors.ResourceExhaustedError("x" * 20_000, retry_after_s=1.5),
    "away": errors.UnavailableError("the store is away"),
    "long": errors.FencedError("字" * 5000),
    "crash": RuntimeError("the secret is 42"),
}


class EchoServicer:
    """Fails in the way the request names."""

    def __init__(self) -> None:
        self.waiting = asyncio.Event()
        self.ended = asyncio.Event()

    async def Echo(self, request: StringValue, context: grpc.aio.ServicerContext[Any, Any]) -> StringValue:
        if request.value in FAILURES:
            raise FAILURES[request.value]
        if request.value == "abort":
            await context.abort(grpc.StatusCode.DATA_LOSS, "by hand")
        if request.value == "wait":
            self.waiting.set()
            await asyncio.Event().wait()
        if request.value == "who":
            return StringValue(value=caller().subject)
        return request

    async def Chat(
        self, requests: AsyncIterator[StringValue], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[StringValue]:
        try:
            async for request in requests:
                yield await self.Echo(request, context)
        finally:
            self.ended.set()


def add_echo(servicer: EchoServicer, server: grpc.aio.Server, *, service: str = ECHO) -> None:
    """What generated code would do."""
    handlers = {
        "Echo": grpc.unary_unary_rpc_method_handler(servicer.Echo, **_CODEC),
        "Chat": grpc.stream_stream_rpc_method_handler(servicer.Chat, **_CODEC),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_registered_method_handlers(service, handlers)


class GeneratedServicer:
    """Lacks every rpc: what generated code gives to derive from."""

    async def Echo(self, request: StringValue, context: object) -> StringValue:
        raise NotImplementedError("Method not implemented!")

    Chat = Echo


GeneratedServicer.Echo.__module__ = "astraflow_kit_test.v1.echo_service_pb2_grpc"


def add_later(servicer: EchoServicer, server: grpc.aio.Server) -> None:
    """A service that the contract declares and this release lacks."""
    add_echo(servicer, server, service=LATER)


def add_naked(servicer: EchoServicer, server: grpc.aio.Server) -> None:
    """A service whose rpc declares no roles."""
    add_echo(servicer, server, service=NAKED)


def made(
    *services: Registration, settings: DaemonSettings | None = None, metrics: Metrics | None = None
) -> serve.GrpcServer:
    """Not started yet."""
    return serve.GrpcServer(services, settings=settings or DaemonSettings(), metrics=metrics or Metrics())


@asynccontextmanager
async def serving(
    settings: DaemonSettings | None = None,
    *,
    metrics: Metrics | None = None,
    servicer: EchoServicer | None = None,
) -> AsyncIterator[tuple[serve.GrpcServer, Channel]]:
    services: list[Registration] = [(add_echo, servicer or EchoServicer()), (add_later, GeneratedServicer())]
    server = made(*services, settings=settings, metrics=metrics)
    await server.start()
    options = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
    channel = grpc.aio.insecure_channel(server.address, options=options)
    try:
        yield server, channel
    finally:
        await channel.close()
        await server.stop(deadline_s=1)


def say(channel: Channel, text: str, *, service: str = ECHO, metadata: Any = ()) -> Awaitable[StringValue]:
    """Call Echo with this text."""
    call: Any = channel.unary_unary(f"/{service}/Echo", **_CLIENT_CODEC)
    answer: Awaitable[StringValue] = call(StringValue(value=text), timeout=30, metadata=metadata)
    return answer


def chatting(channel: Channel, *, service: str = ECHO) -> Any:
    """An open stream; its messages are the test's to write and read."""
    chat: Any = channel.stream_stream(f"/{service}/Chat", **_CLIENT_CODEC)
    return chat(timeout=20)


def logged() -> Callable[[str], list[dict[str, Any]]]:
    """Log to memory from now on; gives the lines whose event has this word."""
    lines = io.StringIO()
    log.configure("test", log_format="json", stream=lines)
    return lambda word: [
        line for line in map(json.loads, lines.getvalue().splitlines()) if word in line["event"]
    ]


@pytest.fixture
async def channel() -> AsyncIterator[Channel]:
    """To a server with default settings."""
    async with serving() as (_, opened):
        yield opened


async def refusal(call: Awaitable[object], kind: type[errors.AstraflowError] | None = None) -> Any:
    """The error that the call ends with, of just this kind; gRPC's own is its cause."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = from_rpc_error(caught.value)
    error.__cause__ = caught.value
    assert kind in (None, type(error))
    return error


async def test_a_call_is_answered_on_a_free_port() -> None:
    async with serving() as (server, channel):
        assert (await say(channel, "hello")).value == "hello"
        assert int(server.address.rpartition(":")[2]) > 0


async def test_a_typed_error_crosses_the_wire_whole(channel: Channel) -> None:
    error = await refusal(say(channel, "fenced"), errors.FencedError)
    assert error.message == "epoch 3 is older than 4; claim again"
    assert error.metadata["epoch"] == "4"
    assert error.__cause__.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_retry_info_survives_and_long_messages_are_cut(channel: Channel) -> None:
    error = await refusal(say(channel, "full"), errors.ResourceExhaustedError)
    assert error.retry_after_s == 1.5
    assert 1000 < len(error.message) < 4000


async def test_a_defect_is_internal_without_its_text_and_logged_under_the_correlation_id() -> None:
    lines = logged()
    async with serving() as (_, channel):
        metadata = ((serve.CORRELATION_METADATA, "abc-123"),)
        error = await refusal(say(channel, "crash", metadata=metadata), errors.InternalError)
    assert error.metadata["correlation_id"] == "abc-123"
    raw = error.__cause__
    assert "42" not in f"{error.message}{raw.details()}{raw.trailing_metadata()!r}"
    [crash] = lines("rpc.crashed")
    assert crash["correlation_id"] == "abc-123"
    assert "the secret is 42" in crash["exception"]


@pytest.mark.parametrize("unusable", ["", "x" * 65])
async def test_an_unusable_correlation_id_is_replaced(unusable: str, channel: Channel) -> None:
    metadata = ((serve.CORRELATION_METADATA, unusable),)
    error = await refusal(say(channel, "crash", metadata=metadata))
    assert len(error.metadata["correlation_id"]) == 26


async def test_a_stream_is_served_and_its_error_is_typed() -> None:
    servicer = EchoServicer()
    async with serving(servicer=servicer) as (_, channel):
        call = chatting(channel)
        await call.write(StringValue(value="one"))
        assert (await call.read()).value == "one"
        await call.write(StringValue(value="fenced"))
        await refusal(call.read(), errors.FencedError)
        await asyncio.wait_for(servicer.ended.wait(), 30)


async def test_a_cancelled_stream_ends_its_servicer_and_is_counted() -> None:
    servicer, metrics = EchoServicer(), Metrics()
    async with serving(servicer=servicer, metrics=metrics) as (_, channel):
        call = chatting(channel)
        await call.write(StringValue(value="one"))
        await call.read()
        await call.write(StringValue(value="wait"))
        await asyncio.wait_for(servicer.waiting.wait(), 30)
        call.cancel()
        await asyncio.wait_for(servicer.ended.wait(), 30)
    text = metrics.render().decode()
    assert f'astraflow_rpcs_total{{code="CANCELLED",rpc="/{ECHO}/Chat"}} 1.0' in text
    assert f'astraflow_rpcs_active{{rpc="/{ECHO}/Chat"}} 0.0' in text


async def test_calls_are_counted_by_final_code() -> None:
    metrics = Metrics()
    async with serving(metrics=metrics) as (_, channel):
        await say(channel, "a")
        for value in ("fenced", "crash", "abort"):
            await refusal(say(channel, value))
    text = metrics.render().decode()
    for code in ("OK", "FAILED_PRECONDITION", "INTERNAL", "ABORTED_BY_SERVICER"):
        assert f'astraflow_rpcs_total{{code="{code}",rpc="/{ECHO}/Echo"}} 1.0' in text


@pytest.mark.parametrize(
    ("scheme", "who", "answer"),
    [
        ("Bearer", "boss", "boss"),
        ("bearer", "boss", "boss"),
        ("Bearer", "node", errors.PermissionError_),
        ("Bearer", "nobody", errors.UnauthenticatedError),
        ("Basic", "boss", errors.UnauthenticatedError),
        ("", "", errors.UnauthenticatedError),
    ],
)
async def test_an_rpc_is_open_to_the_roles_its_contract_names(
    tmp_path: Path, scheme: str, who: str, answer: str | type[errors.AstraflowError]
) -> None:
    sent = token(who, TOKENS[who]) if who in TOKENS else who
    metadata = (("authorization", f"{scheme} {sent}"),) if scheme else ()
    async with serving(DaemonSettings(token_keys_file=keys_file(tmp_path))) as (_, channel):
        call = say(channel, "who", metadata=metadata)
        if isinstance(answer, str):
            assert (await call).value == answer
        else:
            await refusal(call, answer)


async def test_without_tokens_anyone_may_call_but_a_token_is_not_ignored(channel: Channel) -> None:
    assert (await say(channel, "who")).value == "anonymous"
    metadata = (("authorization", "Bearer boss"),)
    error = await refusal(say(channel, "who", metadata=metadata), errors.UnauthenticatedError)
    assert "token_keys_file" in error.message


async def test_health_needs_no_token_and_reflection_takes_its_stream_with_one_alone(tmp_path: Path) -> None:
    async with serving(DaemonSettings(token_keys_file=keys_file(tmp_path))) as (_, channel):
        health: Any = health_pb2_grpc.HealthStub(channel)
        for name in ("", ECHO, LATER):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=30)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]
        with pytest.raises(grpc.aio.AioRpcError, match="only to callers with a token"):
            await anext(aiter(stub.ServerReflectionInfo(iter([asked]), timeout=30)))
        shown = [("authorization", f"Bearer {token('n', 'viewer')}")]
        answers = [a async for a in stub.ServerReflectionInfo(iter([asked]), timeout=30, metadata=shown)]
    names = {service.name for service in answers[0].list_services_response.service}
    assert names == {ECHO, LATER, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


async def test_an_unknown_rpc_is_told_what_this_server_has() -> None:
    metrics = Metrics()
    async with serving(metrics=metrics) as (_, channel):
        error = await refusal(say(channel, "", service="no.such.Service"), errors.UnimplementedError)
    assert error.metadata["capability"] == "/no.such.Service/Echo"
    assert ECHO in error.message
    assert "no.such" not in metrics.render().decode(), "callers must not be able to make series"


async def test_an_rpc_that_the_contract_declares_missing_names_what_is_missing(channel: Channel) -> None:
    for call in (say(channel, "", service=LATER), chatting(channel, service=LATER).read()):
        refused = await refusal(call, errors.UnimplementedError)
        assert refused.metadata["capability"] == "later"
        assert "call EchoService until then" in refused.message


@pytest.mark.parametrize(
    ("registration", "complaint"),
    [
        ((add_echo, GeneratedServicer()), "GeneratedServicer lacks .*EchoService.Echo: implement it"),
        ((add_later, EchoServicer()), "EchoServicer has .*LaterService.Echo: drop"),
        ((add_naked, EchoServicer()), r"NakedService\.Echo names no caller"),
    ],
    ids=["lacks an rpc", "has a missing one", "has an rpc without roles"],
)
async def test_a_servicer_unlike_its_contract_is_refused(registration: Registration, complaint: str) -> None:
    with pytest.raises(ContractError, match=complaint):
        await made(registration).start()


async def test_messages_beyond_grpcs_own_4_mib_pass_and_those_beyond_64_mib_do_not(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "admit", lambda _: None)  # a StringValue has the bound of a text otherwise
    large = "x" * 6 * 2**20
    assert (await say(channel, large)).value == large
    error = await refusal(say(channel, "x" * serve.MAX_MESSAGE_BYTES), errors.InvalidArgumentError)
    assert "Echo has 67108869 bytes, at most 67108864; send it in parts" in error.message
    error = await refusal(say(channel, "x" * 2 * serve.MAX_MESSAGE_BYTES), errors.InvalidArgumentError)
    assert (await say(channel, large)).value == large, "the connection survives"


@pytest.mark.parametrize("rpc", ["Echo", "Chat"])
async def test_bytes_that_are_no_request_are_refused_with_details(rpc: str, channel: Channel) -> None:
    if rpc == "Echo":
        error = await refusal(
            channel.unary_unary(f"/{ECHO}/Echo")(b"\xff", timeout=30), errors.InvalidArgumentError
        )
    else:
        chat: Any = channel.stream_stream(f"/{ECHO}/Chat")(timeout=30)
        await chat.write(b"\xff")
        error = await refusal(chat.read(), errors.InvalidArgumentError)
    assert error.metadata["rpc"] == f"/{ECHO}/{rpc}"
    assert f"1 bytes are no request of /{ECHO}/{rpc}" in error.message


async def test_a_retryable_error_always_says_when_to_come_back(channel: Channel) -> None:
    away = await refusal(say(channel, "away"), errors.UnavailableError)
    final = await refusal(say(channel, "fenced"))
    assert (away.retry_after_s, final.retry_after_s) == (serve.RETRY_AFTER_S, None)


async def test_a_long_message_in_any_script_arrives_in_part(channel: Channel) -> None:
    error = await refusal(say(channel, "long"), errors.FencedError)
    assert 1100 < len(error.message.encode()) <= 1200  # 9 bytes of the header each
    assert set(error.message) == {"字"}


async def test_a_reason_that_the_contract_does_not_list_is_logged() -> None:
    lines = logged()
    async with serving() as (_, channel):
        await refusal(say(channel, "full"))  # every rpc may answer this one
        await refusal(say(channel, "fenced"))
    assert [line["reason"] for line in lines("undeclared")] == ["FENCED"]


async def test_a_taken_port_is_refused_with_holder_and_remedy() -> None:
    async with serving() as (server, _):
        port = int(server.address.rpartition(":")[2])
        second = made((add_echo, EchoServicer()), settings=DaemonSettings(grpc_port=port))
        complaint = rf"127\.0\.0\.1:{port}: process \d+ \(.+\) holds it; .*grpc_port"
        with pytest.raises(ports.PortError, match=complaint):
            await second.start()
        await second.stop(deadline_s=1)


async def test_stop_lets_an_open_stream_go_and_run_returns() -> None:
    async with serving() as (server, channel):
        running = asyncio.create_task(server.run())
        call = chatting(channel)
        await call.write(StringValue(value="one"))
        await call.read()
        await server.stop(deadline_s=0.2)
        await asyncio.wait_for(running, 30)
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()


async def test_with_tls_files_only_tls_is_spoken(tmp_path: Path) -> None:
    paths = self_signed(tmp_path)
    async with serving(load(DaemonSettings, paths)) as (server, plain):
        await refusal(say(plain, "hello"), errors.UnavailableError)
        credentials = grpc.ssl_channel_credentials(paths["tls_cert_file"].read_bytes())
        async with grpc.aio.secure_channel(server.address, credentials) as channel:
            assert (await say(channel, "hello")).value == "hello"


async def test_a_replaced_certificate_is_shown_to_the_next_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("astraflow_kit.identity.watched.LOOK_EVERY_S", 0.0)
    async with serving(load(DaemonSettings, self_signed(tmp_path))) as (server, _):
        for _ in range(2):
            shown = self_signed(tmp_path)["tls_cert_file"].read_bytes()
            async with grpc.aio.secure_channel(
                server.address, grpc.ssl_channel_credentials(shown)
            ) as channel:
                assert (await say(channel, "hello")).value == "hello"


async def test_mutual_tls_wants_a_certificate_of_the_clients_authority(tmp_path: Path) -> None:
    client = tmp_path / "client"
    client.mkdir()
    own, theirs = self_signed(tmp_path), self_signed(client)
    settings = load(DaemonSettings, {**own, "tls_client_ca_file": theirs["tls_cert_file"]})
    root = own["tls_cert_file"].read_bytes()
    chain, key = theirs["tls_cert_file"].read_bytes(), theirs["tls_key_file"].read_bytes()
    async with serving(settings) as (server, _):
        async with grpc.aio.secure_channel(server.address, grpc.ssl_channel_credentials(root)) as stranger:
            await refusal(say(stranger, "hello"), errors.UnavailableError)
        known = grpc.ssl_channel_credentials(root, key, chain)
        async with grpc.aio.secure_channel(server.address, known) as channel:
            assert (await say(channel, "hello")).value == "hello"


async def test_a_replaced_authority_of_clients_decides_over_the_next_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("astraflow_kit.identity.watched.LOOK_EVERY_S", 0.0)
    pairs = {}
    for name in ("server", "old", "new"):
        (tmp_path / name).mkdir()
        pairs[name] = self_signed(tmp_path / name)
    in_force = tmp_path / "clients.pem"
    in_force.write_bytes(pairs["old"]["tls_cert_file"].read_bytes())
    root = pairs["server"]["tls_cert_file"].read_bytes()
    async with serving(load(DaemonSettings, {**pairs["server"], "tls_client_ca_file": in_force})) as (
        server,
        _,
    ):
        for known, stranger in (("old", "new"), ("new", "old")):
            in_force.write_bytes(pairs[known]["tls_cert_file"].read_bytes())
            for name in (stranger, known):
                shown = [pairs[name][part].read_bytes() for part in ("tls_key_file", "tls_cert_file")]
                credentials = grpc.ssl_channel_credentials(root, *shown)
                async with grpc.aio.secure_channel(server.address, credentials) as channel:
                    if name == known:
                        assert (await say(channel, "hello")).value == "hello"
                    else:
                        await refusal(say(channel, "hello"), errors.UnavailableError)


async def test_a_reachable_address_says_what_it_gives_up() -> None:
    lines = logged()
    async with serving(DaemonSettings(host="0.0.0.0", insecure=True)):
        [exposed] = lines("server.exposed")
    assert "no TLS" in exposed["gives_up"]
    assert "no tokens: whoever reaches the address acts in every role" in exposed["gives_up"]


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (grpc.Compression.Gzip, "compressed with gzip"),
        (grpc.Compression.Deflate, "its client compresses requests"),
    ],
)
async def test_a_compressed_request_is_refused_by_name_and_not_inflated(
    algorithm: grpc.Compression, words: str
) -> None:
    async with (
        serving() as (server, _),
        grpc.aio.insecure_channel(server.address, compression=algorithm) as compressing,
    ):
        error = await refusal(say(compressing, "x" * 10_000), errors.InvalidArgumentError)
    assert words in error.message


async def test_a_call_whose_message_does_not_arrive_in_time_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "REQUEST_TIMEOUT_S", 0.3)
    async with serving() as (server, channel):
        slow = await asyncio.to_thread(RawConnection, server.address)
        part = message(b"slow", declared=1000)
        ended = await asyncio.to_thread(slow.call, f"/{ECHO}/Echo", part, whole=False)
        slow.close()
        assert f"the request of /{ECHO}/Echo did not arrive within 0.3 s".encode() in ended.trailers
        assert (await say(channel, "hello")).value == "hello"


@pytest.mark.parametrize("sent", [b"", HALF_A_HEADER], ids=["nothing", "a cut frame"])
async def test_a_connection_without_a_whole_call_is_closed(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = [(name, value) for name, value in serve._OPTIONS if name != "grpc.max_connection_idle_ms"]
    assert len(usual) == len(serve._OPTIONS) - 1
    monkeypatch.setattr(serve, "_OPTIONS", (*usual, ("grpc.max_connection_idle_ms", 300)))
    async with serving() as (server, _):
        silent = await asyncio.to_thread(RawConnection, server.address)
        silent.send(sent)
        await asyncio.to_thread(silent.wait_for_end)
        silent.close()
