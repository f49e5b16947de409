"""Connections of strangers to a server that knows its callers: what they send is not read, and costs little."""

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from threading import Event

import psutil
import pytest

from astraflow.client import Client
from support.dataflow_process import DataflowProcess
from support.development import ROOT
from support.raw_http2 import BOMB, HALF_A_HEADER, RawConnection, message
from support.results_pages import replace_section
from support.tokens import keys_file, token

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

CONNECTIONS, CALLS = 32, 4
MAX_COST_MIB, MAX_P99_S = 50, 0.3
PUSH = "/astraflow.dataflow.v1.TrajectoryService/PushEpisode"
INFO = "/astraflow.dataflow.v1.AdminService/GetServerInfo"
WATCH = "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
EXPIRED = {"authorization": f"Bearer {token('gone', 'rollout', exp=0)}"}
_RESULTS = ROOT / "docs" / "results" / "chaos.md"
_ABOUT = """Written by `make soak T=tests/integration/test_hostile_connections.py`. Connections of strangers to a server
that knows its callers: what they send is not read before they are known. *Memory* is the most that the server had
beyond what it had before, *call* what somebody else waited for an answer of `GetServerInfo` meanwhile; the table's
kinds met one server, one after the other, so memory of the first ones is what later ones find."""
GZIP = {"grpc-encoding": "gzip"}
LARGE = message(bytes(8 * 2**20), declared=60 * 2**20)
Hostile = Callable[[RawConnection, Event], object]


def calling(rpc: str, content: bytes, **metadata: str) -> Hostile:
    """One call after the other, as long as somebody else is served."""
    named = {name.replace("_", "-"): value for name, value in metadata.items()}

    def call(connection: RawConnection, served: Event) -> None:
        for number in count(1):
            connection.call(rpc, content, metadata=named, whole=False)
            if number >= CALLS and served.is_set():
                return

    return call


HOSTILE: dict[str, Hostile] = {
    "gzip": calling(PUSH, BOMB, **GZIP),
    "gzip with a token that ended": calling(PUSH, BOMB, **GZIP, **EXPIRED),
    "large messages": calling(PUSH, LARGE, **EXPIRED),
    "large messages of what is open to anyone": calling(INFO, LARGE),
    "gzip of what is open to anyone": calling(INFO, BOMB, **GZIP),
    "streams": calling(WATCH, LARGE),
    "reflection": calling(REFLECTION, LARGE),
    "unknown rpcs": calling("/no.Service/Call", LARGE),
    "half a header": lambda connection, _: connection.send(HALF_A_HEADER),
    "silence": lambda connection, _: connection.send(b""),
}


@pytest.fixture
def server(process: DataflowProcess, tmp_path: Path) -> DataflowProcess:
    process.start(options=["--token-keys-file", str(keys_file(tmp_path))])
    with Client(process.address) as client:  # the first call of a kind loads what it needs
        client.server_info()
    return process


class Memory:
    """The largest resident memory of a process, looked at while a block runs."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._first = self._most = self._process.memory_info().rss

    def look(self) -> None:
        """See what it has now."""
        self._most = max(self._most, self._process.memory_info().rss)

    @property
    def cost_mib(self) -> float:
        """What it took beyond what it had."""
        return (self._most - self._first) / 2**20


@dataclass(frozen=True)
class Lived:
    """What a kind of hostile connections cost a server, and what others waited for its answers meanwhile."""

    cost_mib: float
    pings_s: Sequence[float]

    @property
    def p99_s(self) -> float:
        """The 99th percentile of what a call waited."""
        return statistics.quantiles(self.pings_s, n=100, method="inclusive")[98]


def lived(kind: str, server: DataflowProcess, *, num_pings: int) -> Lived:
    """32 connections of a kind, and somebody who calls one after the other."""
    memory, pings_s, served = Memory(server.pid), list[float](), Event()
    opened = [RawConnection(server.address) for _ in range(CONNECTIONS)]
    with ThreadPoolExecutor(CONNECTIONS) as pool, Client(server.address) as client:
        attacks = [pool.submit(HOSTILE[kind], connection, served) for connection in opened]
        for _ in range(num_pings):
            began_s = time.monotonic()
            client.server_info()
            pings_s.append(time.monotonic() - began_s)
            memory.look()
        served.set()
        for attack in attacks:
            attack.result()
        memory.look()
    for connection in opened:
        connection.close()
    return Lived(memory.cost_mib, pings_s)


@pytest.mark.ci
@pytest.mark.parametrize("kind", HOSTILE)
def test_32_connections_of_strangers_cost_little_memory_and_everybody_else_is_answered(
    kind: str, server: DataflowProcess
) -> None:
    assert lived(kind, server, num_pings=50).cost_mib <= MAX_COST_MIB


@pytest.mark.soak
def test_what_hostile_connections_cost_is_written_down(server: DataflowProcess) -> None:
    kinds = {kind: lived(kind, server, num_pings=300) for kind in HOSTILE}
    rows = [
        f"| {kind} | {cost.cost_mib:.1f} | {statistics.median(cost.pings_s) * 1e3:.1f} | {cost.p99_s * 1e3:.1f} |"
        for kind, cost in kinds.items()
    ]
    facts = f"* machine: {platform.machine()}, Python {platform.python_version()}; callers share the server's cores\n"
    facts += f"* date: {datetime.now(tz=UTC):%Y-%m-%d}; {CONNECTIONS} connections, each with one call after the other"
    head = "| connections | memory MiB | call p50 ms | call p99 ms |\n|---|---|---|---|"
    replace_section(_RESULTS, "Hostile connections", "\n\n".join([_ABOUT, facts, "\n".join([head, *rows])]))
    assert {kind: cost.cost_mib for kind, cost in kinds.items() if cost.cost_mib > MAX_COST_MIB} == {}
    assert {kind: cost.p99_s for kind, cost in kinds.items() if cost.p99_s > MAX_P99_S} == {}
