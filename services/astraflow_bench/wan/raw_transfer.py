"""What a link carries without us: plain TCP, as many connections as a node uses, and the round trip.

The sender runs at the store, the receiver at the node; both are started by `experiment` as processes. Rates are
taken after the windows have opened.
"""

import contextlib
import os
import socket
import sys
import threading
import time

from astraflow_bench.wan import messages

_CHUNK_BYTES = 2**20
_PINGS = 4
_TIMEOUT_S = 60.0


def send(port: int) -> None:
    """Answer one byte with one byte until a connection says `s`; then send to it until it closes."""
    with socket.create_server(("0.0.0.0", port)) as server:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_serve, args=(connection,), daemon=True).start()


def _serve(connection: socket.socket) -> None:
    chunk = memoryview(bytes(_CHUNK_BYTES))
    with connection, contextlib.suppress(OSError):  # the receiver closes when it has seen enough
        while (order := connection.recv(1)) == b"p":
            connection.sendall(b"p")
        while order:
            connection.sendall(chunk)


class _Receiver:
    def __init__(self, address: tuple[str, int], *, connections: int) -> None:
        self._sockets = [socket.create_connection(address, timeout=_TIMEOUT_S) for _ in range(connections)]
        self._counts = [0] * connections
        self._stop = threading.Event()

    def rtt_s(self) -> float:
        """Least of a few round trips."""
        found = []
        for _ in range(_PINGS):
            started = time.monotonic()
            self._sockets[0].sendall(b"p")
            self._sockets[0].recv(1)
            found.append(time.monotonic() - started)
        return min(found)

    def bits_per_s(self, *, warm_up_s: float, measure_s: float) -> float:
        """Rate of all connections together after `warm_up_s`."""
        threads = [
            threading.Thread(target=self._receive, args=(number,)) for number in range(len(self._counts))
        ]
        for connection, thread in zip(self._sockets, threads, strict=True):
            connection.sendall(b"s")
            thread.start()
        time.sleep(warm_up_s)
        before, started = sum(self._counts), time.monotonic()
        time.sleep(measure_s)
        rate = 8 * (sum(self._counts) - before) / (time.monotonic() - started)
        self._stop.set()
        for thread in threads:
            thread.join()
        return rate

    def close(self) -> None:
        for connection in self._sockets:
            connection.close()

    def _receive(self, number: int) -> None:
        buffer = bytearray(_CHUNK_BYTES)
        while not self._stop.is_set() and (size := self._sockets[number].recv_into(buffer)):
            self._counts[number] += size


def main() -> None:
    """`send PORT`, or orders {address, port, connections, warm_up_s, measure_s}, each answered with `measured`."""
    if sys.argv[1:2] == ["send"]:
        send(int(sys.argv[2]))
    messages.take_stdout()
    for order in messages.orders():
        receiver = _Receiver((order["address"], order["port"]), connections=order["connections"])
        rtt_s = receiver.rtt_s()
        rate = receiver.bits_per_s(warm_up_s=order["warm_up_s"], measure_s=order["measure_s"])
        receiver.close()
        messages.say("measured", bits_per_s=rate, rtt_s=rtt_s)
    os._exit(0)


if __name__ == "__main__":
    main()
