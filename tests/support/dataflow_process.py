"""The dataflow server as a real process over a real Valkey, to be killed at named moments.

Used by integration tests.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil

from astraflow.client import AsyncClient, RetryPolicy
from astraflow_kit.lifecycle import read_address_file
from astraflow_kit.ports import free_port
from support.dataflow_world import World, until


class DataflowProcess:
    """One server process on a port that stays the same over restarts."""

    def __init__(self, redis_url: str, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        """Where clients connect."""
        self.failpoints_log = folder / "failpoints.jsonl"
        self._redis_url = redis_url
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process that was started."""
        assert self._process is not None, "start it first"
        return self._process.pid

    def start(self, *, failpoints: str = "", options: Sequence[str] = ()) -> None:
        """Start and wait until it serves."""
        address_file = self.folder / "address.json"
        address_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "astraflow_dataflow", "--redis", self._redis_url]
        command += ["--port", str(self.port), "--address-file", str(address_file)]
        command += ["--work-dir", str(self.folder), "--log-format", "json", "--in-process-plugins", "support"]
        command += options
        arming = {"ASTRAFLOW_FAILPOINTS": failpoints, "ASTRAFLOW_FAILPOINTS_LOG": str(self.failpoints_log)}
        tests = str(Path(__file__).parents[1])
        paths = {"PYTHONPATH": os.pathsep.join([tests, *filter(None, sys.path)])}
        with (self.folder / "server.log").open("ab") as output:
            self._process = subprocess.Popen(command, env=os.environ | arming | paths, stderr=output)
        deadline_s = time.monotonic() + 60
        while read_address_file(address_file) is None:
            assert self._process.poll() is None, f"the server ended: {self.log()}"
            assert time.monotonic() < deadline_s, f"the server does not start: {self.log()}"
            time.sleep(0.05)

    def wait_until_ended(self) -> None:
        """Wait for the process to die of its failpoint."""
        if self._process is not None:
            self._process.wait(timeout=20)

    def kill(self) -> None:
        """SIGKILL, whatever it is doing."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=20)
            self._process = None

    def signal(self, number: signal.Signals) -> int:
        """Send a signal, wait for the end and return the exit code."""
        assert self._process is not None, "start the server first"
        self._process.send_signal(number)
        code = self._process.wait(timeout=40)
        self._process = None
        return code

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It hangs during the block: SIGSTOP, and SIGCONT at its end."""
        assert self._process is not None, "start it first"
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    async def frozen(self) -> None:
        """Wait until a failpoint has stopped it."""
        assert self._process is not None, "start it first"
        process = psutil.Process(self._process.pid)

        async def is_stopped() -> bool:
            return process.status() == psutil.STATUS_STOPPED

        await until(is_stopped)

    def go_on(self) -> None:
        """Let a frozen one continue."""
        assert self._process is not None, "start it first"
        self._process.send_signal(signal.SIGCONT)

    def log(self) -> str:
        """The end of its log."""
        return (self.folder / "server.log").read_text()[-2000:]

    @asynccontextmanager
    async def world(self, *, retry_s: float = 0.0) -> AsyncIterator[World]:
        """A client of the process; `dataflow` is not available, only the contract is."""
        async with AsyncClient(self.address, retry=RetryPolicy(total_s=retry_s)) as client:
            yield World(dataflow=None, client=client, address=self.address)  # type: ignore[arg-type]
