"""A running client calls by what its files say now: each field of a join string and each file, over real handshakes."""

import asyncio
import queue
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from astraflow.client import AsyncClient, Client, Connection, RetryPolicy
from astraflow.connecting.connection import DialFiles, dial
from astraflow.dataflow.v1 import admin_service_pb2 as admin
from astraflow.dataflow.v1 import task_service_pb2 as tasks
from astraflow.errors import AstraflowError, UnimplementedError
from astraflow.join import JoinString, format_join
from astraflow_launcher.issuing.authority import Issued, issue_certificate
from astraflow_launcher.issuing.tokens import read_authorities
from support.development import wait_for
from support.tls import Authority, tls_server

ONCE = RetryPolicy(total_s=0.0)
PATIENCE_S = 20.0


class Calls(grpc.GenericRpcHandler):
    """Has no rpc, and keeps the token of each call."""

    def __init__(self) -> None:
        self.tokens: list[str] = []

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> None:
        sent = dict(handler_call_details.invocation_metadata or ())
        self.tokens.append(str(sent.get("authorization", "")))


@dataclass
class World:
    """A server that can become another one, and the files of who dials it."""

    folder: Path
    stack: ExitStack
    calls: Calls = field(default_factory=Calls)
    authorities: dict[str, Authority] = field(default_factory=dict)
    address: str = "127.0.0.1:0"
    _served: ExitStack = field(default_factory=ExitStack)

    def authority(self, name: str) -> Authority:
        if name not in self.authorities:
            self.authorities[name] = Authority.create(self.folder / name)
        return self.authorities[name]

    def serve(self, shown: Issued, *, client_ca: bytes | None = None) -> None:
        """End the server before, and its connections; another one takes its address."""
        self._served.close()
        server = tls_server(shown, self.calls, client_ca=client_ca, address=self.address)
        self.address = self._served.enter_context(server)
        self.stack.callback(self._served.close)

    def serve_named(self, name: str) -> None:
        """The same with a certificate of "one" that is for this name only."""
        self.serve(issue_certificate(self.authority("one").folder, name, dns=[name], ips=[], days=1))

    def join(self, **parts: Any) -> Connection:
        """What a node has with a join file."""
        usual = {"address": self.address, "ca": self.ca("one")}
        (self.folder / "join").write_text(format_join(JoinString(**{**usual, **parts})))
        return dial("", join_file=self.folder / "join", files=DialFiles())

    def ca(self, name: str) -> tuple[bytes, ...]:
        return read_authorities(self.authority(name).folder / "ca.pem")

    def files(self, *, ca: str = "one", client: str = "", token: str = "") -> Connection:
        """What a trainer has with an address and files."""
        written: dict[str, Any] = {"ca_file": self.authority(ca).pem}
        if client:
            pair = self.authority(client).client()
            written |= {
                "client_cert_file": pair.certificate.read_bytes(),
                "client_key_file": pair.key.read_bytes(),
            }
        if token:
            written["token_file"] = token.encode()
        for name, content in written.items():
            (self.folder / name).write_bytes(content)
            written[name] = self.folder / name
        return dial(self.address, join_file=None, files=DialFiles(**written))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(tmp_path, stack)


def join_address(world: World) -> Iterator[Connection]:
    world.serve(world.authority("one").server())
    yield world.join()
    world.address = "127.0.0.1:0"
    world.serve(world.authority("one").server("other"))
    yield world.join()


def join_ca(world: World) -> Iterator[Connection]:
    world.serve(world.authority("one").server())
    yield world.join()
    world.serve(world.authority("two").server())
    yield world.join(ca=world.ca("two"))


def join_public_ca(world: World) -> Iterator[Connection]:
    world.serve(world.authority("one").server())
    yield world.join(ca=(), public_ca=True)
    yield world.join()


def join_server_name(world: World) -> Iterator[Connection]:
    for name in ("one.example", "two.example"):
        world.serve_named(name)
        yield world.join(server_name=name)


def join_token(world: World) -> Iterator[Connection]:
    world.serve(world.authority("one").server())
    for token in ("first", "second"):
        yield world.join(token=token)


def ca_file(world: World) -> Iterator[Connection]:
    for name in ("one", "two"):
        world.serve(world.authority(name).server())
        yield world.files(ca=name)


def client_pair(world: World) -> Iterator[Connection]:
    for name in ("one", "two"):
        world.serve(world.authority("one").server(f"server-{name}"), client_ca=world.authority(name).pem)
        yield world.files(client=name)


def token_file(world: World) -> Iterator[Connection]:
    world.serve(world.authority("one").server())
    for token in ("first", "second"):
        yield world.files(token=token)


CHANGES = [
    join_address,
    join_ca,
    join_public_ca,
    join_server_name,
    join_token,
    ca_file,
    client_pair,
    token_file,
]


async def outcome(client: Client | AsyncClient) -> type[AstraflowError]:
    """How a call ends; with UnimplementedError where it reaches the server."""
    try:
        if isinstance(client, AsyncClient):
            await client.call(client.admin.GetServerInfo, admin.GetServerInfoRequest(), retry=ONCE)
        else:
            request = admin.GetServerInfoRequest()
            await asyncio.to_thread(client.call, client.admin.GetServerInfo, request, retry=ONCE)
    except AstraflowError as error:
        return type(error)
    raise AssertionError("the server has no services")


async def closed(client: Client | AsyncClient) -> None:
    if (closing := client.close()) is not None:
        await closing


@pytest.mark.parametrize("twin", [AsyncClient, Client])
@pytest.mark.parametrize("change", CHANGES)
async def test_what_changes_in_the_files_is_in_force_with_the_next_call(
    world: World, change: Callable[[World], Iterator[Connection]], twin: type[Client] | type[AsyncClient]
) -> None:
    states = change(world)
    client = twin(next(states))
    if change is not join_public_ca:  # nobody's authority is one of this machine's
        assert await outcome(client) is UnimplementedError
    next(states)
    assert await outcome(client) is UnimplementedError
    if "token" in change.__name__:
        assert world.calls.tokens == ["Bearer first", "Bearer second"]
    await closed(client)


def echo() -> grpc.GenericRpcHandler:
    """TaskService with a Work that answers each request."""

    def work(requests: Iterator[Any], _context: object) -> Iterator[tasks.WorkResponse]:
        for _ in requests:
            yield tasks.WorkResponse()

    served = grpc.stream_stream_rpc_method_handler(
        work, tasks.WorkRequest.FromString, tasks.WorkResponse.SerializeToString
    )
    return grpc.method_handlers_generic_handler("astraflow.dataflow.v1.TaskService", {"Work": served})


def connections_to(address: str) -> int:
    """Connections of this process to the address that are open."""
    port = int(address.rpartition(":")[2])
    found = psutil.Process().net_connections("tcp")
    return sum(each.status == psutil.CONN_ESTABLISHED and each.raddr[1:] == (port,) for each in found)


@pytest.fixture
def moving() -> Iterator[tuple[Connection, str, Callable[[], None]]]:
    """A connection to a server, the server's address, and what leads it to another server."""
    with tls_server(None, echo()) as first, tls_server(None) as second:
        states = [Connection(first)]
        yield replace(states[0], again=lambda: states[-1]), first, lambda: states.append(Connection(second))


async def test_a_stream_ends_where_it_began_and_its_channel_closes_after_it(
    moving: tuple[Connection, str, Callable[[], None]],
) -> None:
    connection, first, move = moving
    async with AsyncClient(connection) as client:
        call = client.open(client.tasks.Work)
        for _ in range(2):
            await call.write(tasks.WorkRequest())
            assert await call.read() == tasks.WorkResponse()
            move()
            assert await outcome(client) is UnimplementedError
        assert connections_to(first) == 1
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        del call
        async with asyncio.timeout(PATIENCE_S):
            while connections_to(first):
                assert await outcome(client) is UnimplementedError  # closes what is not used any more
                await asyncio.sleep(0.05)


def test_a_blocking_stream_does_so_too(moving: tuple[Connection, str, Callable[[], None]]) -> None:
    connection, first, move = moving
    requests: queue.Queue[tasks.WorkRequest | None] = queue.Queue()
    with Client(connection) as client:
        answers = client.tasks.Work(iter(requests.get, None))
        for _ in range(2):
            requests.put(tasks.WorkRequest())
            assert next(answers) == tasks.WorkResponse()
            move()
            assert asyncio.run(outcome(client)) is UnimplementedError
        assert connections_to(first) == 1
        requests.put(None)
        assert list(answers) == []

        def gone() -> bool:
            assert (
                asyncio.run(outcome(client)) is UnimplementedError
            )  # which closes what is not used any more
            return connections_to(first) == 0

        wait_for(gone, timeout_s=PATIENCE_S)


async def test_closing_a_client_ends_the_streams_of_its_earlier_channels(
    moving: tuple[Connection, str, Callable[[], None]],
) -> None:
    connection, _, move = moving
    client = AsyncClient(connection)
    call = client.open(client.tasks.Work)
    await call.write(tasks.WorkRequest())
    await call.read()
    move()
    await outcome(client)
    await client.close()
    assert call.cancelled()


@pytest.mark.parametrize("twin", [AsyncClient, Client])
async def test_a_call_that_begins_after_the_close_is_refused(twin: type[AsyncClient] | type[Client]) -> None:
    """Of a client that another thread closes: grpc's own channel crashes the process at an rpc it never had."""
    client = twin("127.0.0.1:9")
    closing = client.close()
    if closing is not None:
        await closing
    with pytest.raises(ValueError, match="closed channel"):
        client.admin.GetServerInfo(admin.GetServerInfoRequest())
