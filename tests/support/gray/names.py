"""A server whose name leads to another address after a while: `python -m support.gray.names FOLDER`.

`followed` starts it in a mount and a network namespace of its own: there the names of the machine are its own.
"""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

from astraflow.client import AsyncClient, RetryPolicy
from astraflow.dataflow.v1 import run_service_pb2 as runs
from astraflow_kit.family import ending_with_us
from support.dataflow_process import DataflowProcess
from support.source_tree import REPOSITORY
from support.valkey import ValkeyServer, server_binary

NAME = "dataflow.test"
FIRST, SECOND = "127.0.0.2", "127.0.0.3"


def lead_to(hosts: Path, address: str) -> None:
    """The name leads to this address from now on."""
    hosts.write_text(f"127.0.0.1 localhost\n{address} {NAME}\n")


async def move(folder: Path, redis_url: str) -> float:
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


def followed(folder: Path) -> float:
    """Return the seconds that a client took until the server at its new address answered it."""
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


def main(folder: Path) -> None:
    """Write the seconds."""
    lead_to(folder / "hosts", FIRST)
    subprocess.run(["mount", "--bind", str(folder / "hosts"), "/etc/hosts"], check=True)
    with ValkeyServer(folder / "valkey", binary=server_binary()) as valkey:
        sys.stdout.write(f"{asyncio.run(move(folder, valkey.url))}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
