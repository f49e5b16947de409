"""The processes that are measured, Redis and dataflow servers, and what they spent.

Invariant: they end with the block that started them, and with this process. Redis keeps an append-only file with
`everysec`, as production does. Used by every measurement of this room.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from astraflow.client import AsyncClient
from astraflow_bench.dataflow.resp import RespSocket
from astraflow_bench.figures import cpu_seconds
from astraflow_kit.lifecycle import read_address_file
from astraflow_kit.parent import dying_with_us, python
from astraflow_kit.ports import free_port
from astraflow_launcher.run.embedded_redis import require_server, server_command, wait_until_answering

_START_S = 300.0
_SYNCED_S = 1.2
"""Then what was written to a file that is synced every second is on the disk."""
REDIS_AS_DEPLOYED = ("--auto-aof-rewrite-min-size", "1gb")
"""Where a Redis is set up otherwise than a laptop's: that of compose and of the chart, too."""


@dataclass
class Spent:
    """What a block of work took; filled when the block ends."""

    seconds: float = 0.0
    server_s: float = 0.0
    """CPU of all server processes."""
    redis_s: float = 0.0
    commands: Counter[str] = field(default_factory=Counter)

    @property
    def num_commands(self) -> int:
        """Redis commands, those inside functions too."""
        return sum(self.commands.values())


@dataclass
class Bed:
    """A Redis and servers over it, with a client of the first one."""

    client: AsyncClient
    addresses: Sequence[str]
    servers: Sequence[int]
    """Process ids."""
    redis: int
    resp: RespSocket
    redis_again: Callable[[], AbstractContextManager[object]]
    """Starts the Redis that was killed on the files that it left, and returns once it answers."""

    @contextmanager
    def spending(self) -> Iterator[Spent]:
        """Measure what is done in the block."""
        spent, began_s, before = Spent(), time.perf_counter(), Counter(self.resp.commands_done())
        servers_s, redis_s = cpu_seconds(self.servers), self._redis_seconds()
        yield spent
        spent.seconds = time.perf_counter() - began_s
        spent.server_s = cpu_seconds(self.servers) - servers_s
        spent.redis_s = self._redis_seconds() - redis_s
        spent.commands = Counter(self.resp.commands_done()) - before

    @asynccontextmanager
    async def spending_until_synced(self) -> AsyncIterator[Spent]:
        """The same, with what Redis takes to sync what was written to its disk, which it does every second: by chance
        that falls in a short block, or behind it.
        """
        await asyncio.sleep(_SYNCED_S)
        redis_s = self._redis_seconds()
        with self.spending() as spent:
            yield spent
        await asyncio.sleep(_SYNCED_S)
        spent.redis_s = self._redis_seconds() - redis_s

    def _redis_seconds(self) -> float:
        """CPU time of Redis, whose one core is what a fleet runs out of. Those that write its file anew, on another
        core, live now and then: with them figures would jump, and fall below nothing when one ends.
        """
        return cpu_seconds([self.redis], with_children=False)

    def resident_bytes(self, pid: int) -> int:
        """Memory of a process."""
        return int(psutil.Process(pid).memory_info().rss)

    @contextmanager
    def slow_calls(self) -> Iterator[list[tuple[float, str]]]:
        """The one that held Redis longest is in the list afterwards: milliseconds, name."""
        slowest: list[tuple[float, str]] = []
        self.resp.pipeline([("CONFIG", "SET", "slowlog-log-slower-than", 200), ("SLOWLOG", "RESET")])
        yield slowest
        slowest.append(self.resp.slowest_function())


@asynccontextmanager
async def over_redis(
    folder: Path, *, num_servers: int = 1, options: Sequence[str] = ()
) -> AsyncIterator[Bed]:
    """A fresh Redis with servers over it, which have these options."""
    folder.mkdir()  # noqa: ASYNC240 - nothing else runs here
    with ExitStack() as stack:
        port = free_port()
        redis = stack.enter_context(redis_process(folder, port))
        url = f"redis://127.0.0.1:{port}/0"
        started = [
            stack.enter_context(_server(url, folder / f"server-{n}", options)) for n in range(num_servers)
        ]
        addresses = [await _address(server, path) for server, path in started]
        resp = RespSocket(port)
        stack.callback(resp.close)
        async with AsyncClient(addresses[0]) as client:
            pids = [server.pid for server, _ in started]
            yield Bed(
                client=client,
                addresses=addresses,
                servers=pids,
                redis=redis,
                resp=resp,
                redis_again=partial(redis_process, folder, port),
            )


@contextmanager
def running(command: Sequence[str], *, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process for as long as the block."""
    with (
        log.open("ab") as output,
        subprocess.Popen(dying_with_us(*command), stdout=output, stderr=output) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def redis_process(folder: Path, port: int) -> Iterator[int]:
    """A Redis that keeps its files in the folder; its process id."""
    command = [*server_command(require_server(), port=port, folder=folder), *REDIS_AS_DEPLOYED]
    with running(command, log=folder / "redis.log") as process:
        wait_until_answering(port, folder=folder, timeout_s=_START_S)
        yield process.pid


@contextmanager
def _server(url: str, folder: Path, options: Sequence[str]) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    folder.mkdir()
    path = folder / "address.json"
    command = [*python("astraflow_dataflow", "--redis", url, "--log-level", "warning")]
    command += ["--work-dir", str(folder), "--address-file", str(path), *options]
    with running(command, log=folder / "server.log") as process:
        yield process, path


async def _address(process: subprocess.Popen[bytes], path: Path) -> str:
    deadline_s = time.monotonic() + _START_S
    while (found := read_address_file(path)) is None:
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(
                f"the server did not start: {(path.parent / 'server.log').read_text()[-2000:]}"
            )
        await asyncio.sleep(0.05)
    return found.grpc
