"""Listening ports: a free one, or who holds one that is taken and what to do about it."""

import os
import random
import socket
from collections import deque
from contextlib import suppress
from pathlib import Path

from astraflow.errors import RequestError

LOOPBACK = "127.0.0.1"
_LISTEN = "0A"
_CHOSEN, _TRIED, _MOST_RESERVED = range(20_000, 30_000), 100, 64
_reserved = deque[int]()
"""Descriptors, one for each of the last ports given; who was given an earlier one has bound it long since."""


class PortError(RequestError):
    """An address cannot be bound."""

    reason, code = "PORT_TAKEN", "UNAVAILABLE"


def free_port() -> int:
    """A port of loopback that nobody holds now, and that no other process of ours is given while this one lives.

    Below the ports that the system gives to outgoing connections and to servers that name none: one of those
    would take it before its user does. Processes tell each other by a name of the network's namespace.
    """
    for port in random.Random().sample(_CHOSEN, _TRIED):
        reservation = socket.socket(socket.AF_UNIX)
        with socket.socket() as probe, suppress(OSError):
            reservation.bind(f"\0astraflow port {port}")
            probe.bind((LOOPBACK, port))
            _reserved.append(reservation.detach())
            if len(_reserved) > _MOST_RESERVED:
                os.close(_reserved.popleft())
            return port
        reservation.close()
    raise PortError(f"{_TRIED} ports of {LOOPBACK} from {_CHOSEN[0]} to {_CHOSEN[-1]} are all taken")


def bind_failure(host: str, port: int, *, setting: str) -> PortError:
    """The error for a failed bind, naming the process that holds the port where the system tells us."""
    holder = _holder(port)
    why = f"process {holder} holds it" if holder else "it is taken, or not an address of this machine"
    remedy = f"stop that process or choose another {setting} (0 takes a free one)"
    return PortError(f"cannot listen on {host}:{port}: {why}; {remedy}")


def _holder(port: int) -> str | None:
    """`pid (command)` of the listener on `port`; None off Linux or when it belongs to someone else."""
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for process in Path("/proc").glob("[0-9]*") if sockets else ():
        try:
            if sockets.intersection(_links(process / "fd")):
                return f"{process.name} ({(process / 'comm').read_text().strip()})"
        except OSError:
            continue  # the process ended, or belongs to another user
    return None


def _links(folder: Path) -> list[str]:
    # A descriptor may close while we look, the one that lists this folder among them.
    return [str(entry.readlink()) for entry in folder.iterdir() if entry.is_symlink()]


def _listening_inodes(port: int) -> list[str]:
    inodes = []
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        rows = table.read_text().splitlines()[1:] if table.exists() else []
        for fields in map(str.split, rows):
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.append(fields[9])
    return inodes
