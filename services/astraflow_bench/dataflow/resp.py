"""Redis over a plain socket: the raw SET and GET that ours is compared with, and Redis' own counters.

Invariant: one request after the other, each a pipeline whose replies are all read. Used by the measurements of this
room; the product has its own connection.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import TypeAlias

Reply: TypeAlias = "bytes | int | list[Reply] | None"
Word: TypeAlias = str | bytes | int


class RespSocket:
    """A blocking connection to a Redis on loopback."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=120)
        self._replies = self._socket.makefile("rb")

    def close(self) -> None:
        """Close it."""
        self._replies.close()
        self._socket.close()

    def pipeline(self, commands: Sequence[Sequence[Word]]) -> list[Reply]:
        """Send commands together and return their replies. Raises RuntimeError for one that Redis refuses."""
        self._socket.sendall(b"".join(map(_packed, commands)))
        return [self._reply() for _ in commands]

    def command(self, *words: Word) -> Reply:
        """Send one command."""
        return self.pipeline([words])[0]

    def commands_done(self) -> dict[str, int]:
        """Commands executed so far by name, those inside functions too, without what asks for this."""
        reply = self.command("INFO", "commandstats")
        lines = reply.decode().splitlines() if isinstance(reply, bytes) else []
        stats = (line.removeprefix("cmdstat_").split(":calls=") for line in lines if ":calls=" in line)
        counted = {name: int(rest.partition(",")[0]) for name, rest in stats}
        return {name: calls for name, calls in counted.items() if name not in ("info", "ping")}

    def held_bytes(self) -> int:
        """Memory of what Redis holds."""
        reply = self.command("INFO", "memory")
        lines = reply.decode().splitlines() if isinstance(reply, bytes) else []
        return next(int(line.partition(":")[2]) for line in lines if line.startswith("used_memory:"))

    def slowest_function(self) -> tuple[float, str]:
        """Milliseconds and name of the function call that held Redis longest since its slow log was emptied."""
        entries = self.command("SLOWLOG", "GET", 128)
        found = []
        for entry in entries if isinstance(entries, list) else ():
            if (
                isinstance(entry, list)
                and isinstance(took := entry[2], int)
                and isinstance(words := entry[3], list)
            ):
                verb, name = words[0], words[1] if len(words) > 1 else b""
                if isinstance(verb, bytes) and isinstance(name, bytes) and verb.upper().startswith(b"FCALL"):
                    found.append((took / 1e3, name.decode()))
        return max(found, default=(0.0, "none"))

    def _reply(self) -> Reply:
        line = self._replies.readline()
        kind, rest = line[:1], line[1:-2]
        if kind == b"$":
            return None if rest == b"-1" else self._replies.read(int(rest) + 2)[:-2]
        if kind == b"*":
            return None if rest == b"-1" else [self._reply() for _ in range(int(rest))]
        if kind == b":":
            return int(rest)
        if kind == b"+":
            return rest
        raise RuntimeError(f"Redis answered {line!r}")


def _packed(words: Sequence[Word]) -> bytes:
    parts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"".join([b"*%d\r\n" % len(parts), *(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)])
