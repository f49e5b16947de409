"""Connections of strangers to a server that knows its callers: what they send is not read, and costs little."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from astraflow.client import Client
from support.dataflow_process import DataflowProcess
from support.raw_http2 import BOMB, RawConnection, frame, message
from support.tokens import keys_file, token

pytestmark = [pytest.mark.integration, pytest.mark.ci, pytest.mark.timeout(300)]

CONNECTIONS, CALLS = 32, 4
MAX_COST_MIB = 50
PUSH = "/astraflow.dataflow.v1.TrajectoryService/PushEpisode"
INFO = "/astraflow.dataflow.v1.AdminService/GetServerInfo"
WATCH = "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
EXPIRED = {"authorization": f"Bearer {token('gone', 'rollout', exp=0)}"}
GZIP = {"grpc-encoding": "gzip"}
LARGE = message(bytes(8 * 2**20), declared=60 * 2**20)
Hostile = Callable[[RawConnection], object]


def calling(rpc: str, content: bytes, **metadata: str) -> Hostile:
    """One call after the other."""
    named = {name.replace("_", "-"): value for name, value in metadata.items()}
    return lambda connection: [
        connection.call(rpc, content, metadata=named, whole=False) for _ in range(CALLS)
    ]


HOSTILE: dict[str, Hostile] = {
    "gzip": calling(PUSH, BOMB, **GZIP),
    "gzip with a token that ended": calling(PUSH, BOMB, **GZIP, **EXPIRED),
    "large messages": calling(PUSH, LARGE, **EXPIRED),
    "large messages of what is open to anyone": calling(INFO, LARGE),
    "gzip of what is open to anyone": calling(INFO, BOMB, **GZIP),
    "streams": calling(WATCH, LARGE),
    "reflection": calling(REFLECTION, LARGE),
    "unknown rpcs": calling("/no.Service/Call", LARGE),
    "half a header": lambda connection: connection.send(frame(1, 0, b"\0\x05:meth", stream=1)),
    "silence": lambda connection: connection.send(b""),
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


@pytest.mark.parametrize("kind", HOSTILE)
def test_32_connections_of_strangers_cost_little_memory_and_everybody_else_is_answered(
    kind: str, server: DataflowProcess
) -> None:
    memory = Memory(server.pid)
    opened = [RawConnection(server.address) for _ in range(CONNECTIONS)]
    with ThreadPoolExecutor(CONNECTIONS) as pool, Client(server.address) as client:
        attacks = [pool.submit(HOSTILE[kind], connection) for connection in opened]
        for _ in range(50):
            client.server_info()
            memory.look()
        for attack in attacks:
            attack.result()
        memory.look()
    for connection in opened:
        connection.close()
    assert memory.cost_mib <= MAX_COST_MIB
