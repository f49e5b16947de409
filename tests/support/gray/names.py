"""A server whose name leads to another address after a while: `python -m support.gray.names FOLDER client|loop`.

`followed` starts it in a mount and a network namespace of its own: there the names of the machine are its own.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from astraflow.client import AsyncClient, RetryPolicy
from astraflow.dataflow.v1 import run_service_pb2 as runs
from astraflow_kit.family import ending_with_us
from astraflow_kit.lifecycle import read_address_file
from support.dataflow_process import DataflowProcess
from support.development import RunFiles, beside, dev, read_lines, wait_for
from support.releases import THIS
from support.source_tree import REPOSITORY
from support.valkey import ValkeyServer, server_binary

NAME = "dataflow.test"
FIRST, SECOND = "127.0.0.2", "127.0.0.3"


def lead_to(hosts: Path, address: str) -> None:
    """The name leads to this address from now on."""
    hosts.write_text(f"127.0.0.1 localhost\n{address} {NAME}\n")


@contextmanager
def reached_by(address: str, port: int) -> Iterator[None]:
    """The server of 127.0.0.1 is reached by this address, until every packet to it vanishes."""
    rule = [
        "OUTPUT",
        "-d",
        address,
        "-p",
        "tcp",
        "--dport",
        str(port),
        "-j",
        "DNAT",
        "--to-destination",
        "127.0.0.1",
    ]
    subprocess.run(["iptables", "-t", "nat", "-A", *rule], check=True)
    try:
        yield
    finally:
        subprocess.run(["iptables", "-t", "nat", "-D", *rule], check=True)
        subprocess.run(["iptables", "-t", "mangle", "-A", "OUTPUT", "-d", address, "-j", "DROP"], check=True)


def move_loop(folder: Path) -> float:
    """Move the server under a node and a trainer; return the seconds until they have taken two more steps."""
    files, environment = RunFiles(folder), {**THIS.environment, "ASTRAFLOW_INSECURE": "true"}
    without = ("--without", "raas", "--without", "trainer")
    with ExitStack() as stack:
        stack.enter_context(dev(folder, "--steps", "100000", *without))
        wait_for(lambda: read_address_file(files.addresses / "dataflow.json"), what="the server's start")
        found = read_address_file(files.addresses / "dataflow.json")
        assert found is not None
        port = int(found.grpc.rpartition(":")[2])
        with reached_by(FIRST, port):
            for part in ("node", "trainer"):
                stack.enter_context(beside(part, files, f"{NAME}:{port}", environment=environment))
            _take(2, folder)
        lead_to(folder / "hosts", SECOND)
        with reached_by(SECOND, port):
            began_s = time.monotonic()
            _take(2, folder)
            return time.monotonic() - began_s


def _take(steps: int, folder: Path) -> None:
    def taken() -> int:
        return len(read_lines(folder / "trainer" / "ledger.jsonl"))

    before = taken()
    wait_for(lambda: taken() >= before + steps, what=f"{steps} more steps", timeout_s=200)


async def move_client(folder: Path, redis_url: str) -> float:
    """Move a server from one address to the other under a client; return the seconds until it was followed."""
    server = DataflowProcess(redis_url, folder)
    server.start(options=["--host", FIRST])
    try:
        async with AsyncClient(f"{NAME}:{server.port}", retry=RetryPolicy(total_s=60)) as client:
            request = runs.ListRunsRequest()
            await client.call(client.runs.ListRuns, request)
            server.kill()
            lead_to(folder / "hosts", SECOND)
            server.start(options=["--host", SECOND])
            began_s = time.monotonic()
            await client.call(client.runs.ListRuns, request)
            return time.monotonic() - began_s
    finally:
        server.kill()


def followed(folder: Path, who: str) -> float:
    """Return the seconds until the server at its new address was reached by a `client`, or trained with by a `loop`."""
    paths = os.pathsep.join([*filter(None, sys.path), str(REPOSITORY / "tests")])
    command = [
        "sh",
        "-c",
        'ip link set lo up && exec "$@"',
        "sh",
        sys.executable,
        "-m",
        __name__,
        str(folder),
        who,
    ]
    ended = subprocess.run(
        ending_with_us("unshare", "--mount", "--net", *command),
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-6000:]
    return float(ended.stdout)


def main(folder: Path, who: str) -> None:
    """Write the seconds."""
    lead_to(folder / "hosts", FIRST)
    subprocess.run(["mount", "--bind", str(folder / "hosts"), "/etc/hosts"], check=True)
    if who == "loop":
        took_s = move_loop(folder)
    else:
        with ValkeyServer(folder / "valkey", binary=server_binary()) as valkey:
            took_s = asyncio.run(move_client(folder, valkey.url))
    sys.stdout.write(f"{took_s}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
