"""The processes that publish one model together, as the publisher sees them.

Invariant: `broadcast` and `all_gather` are collectives, called by all in the same order with small messages; `send` and
`receive` move a bounded chunk between two of them. `OnePeer` is a publisher on its own; a sharded trainer
passes its process group. The shard publisher calls it.
"""

from typing import NoReturn, Protocol


class Peers(Protocol):
    """Agreement and transport among the publishers of one model."""

    @property
    def index(self) -> int:
        """This process, from 0; the first one commits."""

    @property
    def size(self) -> int:
        """Number of processes."""

    def broadcast(self, message: bytes) -> bytes:
        """The first process's message, everywhere; what the others pass is ignored."""

    def all_gather(self, message: bytes) -> list[bytes]:
        """The messages of all processes, in order."""

    def send(self, data: bytes | memoryview, *, to: int) -> None:
        """Hand `data` to one process, which receives as many bytes."""

    def receive(self, num_bytes: int, *, source: int) -> memoryview:
        """What `source` sends to this process."""


class OnePeer:
    """A publisher that holds the whole model."""

    index = 0
    size = 1

    def broadcast(self, message: bytes) -> bytes:
        """`message` itself."""
        return message

    def all_gather(self, message: bytes) -> list[bytes]:
        """`message` alone."""
        return [message]

    def send(self, data: bytes | memoryview, *, to: int) -> NoReturn:
        """There is nobody to send to."""
        raise AssertionError(f"{len(data)} bytes for process {to} of one")

    def receive(self, num_bytes: int, *, source: int) -> NoReturn:
        """There is nobody to receive from."""
        raise AssertionError(f"{num_bytes} bytes from process {source} of one")
