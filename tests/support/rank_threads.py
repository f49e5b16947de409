"""Ranks as threads of one process: the same agreement as a process group's, without its seconds of start-up.

`run_ranks(size, work)` calls `work(ranks)` once per rank, each in a thread, and returns the answers in rank
order. A rank that raises releases the others, which then fail with `RankGone`, as a closed connection does.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Queue
from typing import TypeVar

import torch

PATIENCE_S = 30.0
T = TypeVar("T")


class RankGone(RuntimeError):
    """Another rank ended in the middle of a collective."""


@dataclass
class _Shared:
    size: int
    barrier: threading.Barrier
    slots: list[bytes] = field(default_factory=list)
    pipes: dict[tuple[int, int], Queue[bytes]] = field(default_factory=dict)


class ThreadRanks:
    """One rank among threads."""

    def __init__(self, index: int, shared: _Shared) -> None:
        self.index = index
        self.size = shared.size
        self.most_bytes_seen = 0
        """Largest message that was shared with this rank."""
        self.most_bytes_received = 0
        """Largest piece that another rank sent to this one."""
        self.bytes_received = 0
        """All that other ranks sent to this one."""
        self._shared = shared

    def all_gather(self, message: bytes) -> list[bytes]:
        """The messages of all ranks."""
        self._wait()
        self._shared.slots[self.index] = bytes(message)
        self._wait()
        found = list(self._shared.slots)
        self._wait()
        self.most_bytes_seen = max(self.most_bytes_seen, *map(len, found))
        return found

    def broadcast(self, message: bytes) -> bytes:
        """The first rank's message."""
        return self.all_gather(message)[0]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise sum."""
        return torch.stack(self._tensors(values)).sum(0)

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum."""
        return torch.stack(self._tensors(values)).amax(0)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Values of all ranks."""
        return torch.cat(self._tensors(values))

    def send(self, data: bytes | memoryview, *, to: int) -> None:
        """Hand bytes to one rank."""
        self._shared.pipes[self.index, to].put(bytes(data))

    def receive(self, num_bytes: int, *, source: int) -> memoryview:
        """Bytes of one rank."""
        data = self._shared.pipes[source, self.index].get(timeout=PATIENCE_S)
        assert len(data) == num_bytes
        self.most_bytes_received = max(self.most_bytes_received, num_bytes)
        self.bytes_received += num_bytes
        return memoryview(data)

    def leave(self) -> None:
        """End: collectives fail from now on, here and on the other ranks."""
        self._shared.barrier.abort()

    def _tensors(self, values: torch.Tensor) -> list[torch.Tensor]:
        messages = self.all_gather(values.numpy().tobytes())
        nothing = values.new_zeros(0)
        return [
            torch.frombuffer(bytearray(message), dtype=values.dtype) if message else nothing
            for message in messages
        ]

    def _wait(self) -> None:
        try:
            self._shared.barrier.wait(PATIENCE_S)
        except threading.BrokenBarrierError as error:
            raise RankGone(f"rank {self.index}: another rank is gone") from error


def rank_groups(size: int) -> list[ThreadRanks]:
    """One more group of the same ranks, for threads of theirs that talk beside the others."""
    shared = _Shared(size, threading.Barrier(size), [b""] * size)
    shared.pipes = {(left, right): Queue() for left in range(size) for right in range(size)}
    return [ThreadRanks(index, shared) for index in range(size)]


def run_ranks(size: int, work: Callable[[ThreadRanks], T]) -> list[T]:
    """Call `work` once per rank; raises what the first failing rank raised, rather than what that led to."""
    group = rank_groups(size)

    def one(index: int) -> T:
        try:
            return work(group[index])
        except BaseException:
            group[index].leave()
            raise

    with ThreadPoolExecutor(size) as pool:
        running = [pool.submit(one, index) for index in range(size)]
    failures = [error for future in running if (error := future.exception()) is not None]
    for failure in sorted(failures, key=lambda error: isinstance(error, RankGone)):
        raise failure
    return [future.result() for future in running]
