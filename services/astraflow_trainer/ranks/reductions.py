"""The ranks of one policy's trainer: what they agree on, behind one small interface.

Invariant: every method but `send` and `receive` is a collective and gives all ranks the same answer, so
guards and bounds derived from it are taken alike everywhere. `OneRank` is the single process, `GroupRanks` a
torch process group. Called by the training step, the loop and the publisher, each with a group of its own
per thread; statistics are small CPU tensors whatever the device of the model.
"""

from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from astraflow_weights.codec.peers import OnePeer, Peers


class Ranks(Peers, Protocol):
    """Agreement among the processes that train one policy: messages as `Peers` has them, and tensors."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise sum over ranks; equal shapes everywhere."""

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum over ranks; equal shapes everywhere."""

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """One-dimensional values of all ranks, on every rank, in rank order; lengths may differ."""


class OneRank(OnePeer):
    """A trainer of one process: everything is already known."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """`values` themselves."""
        return values

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """`values` themselves."""
        return values

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """`values` themselves."""
        return values


class GroupRanks:
    """The processes of a torch process group that can reduce CPU tensors (gloo)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    @property
    def index(self) -> int:
        """This process, from 0."""
        return dist.get_rank(self._group)

    @property
    def size(self) -> int:
        """Number of processes."""
        return dist.get_world_size(self._group)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise sum over ranks."""
        result = values.clone()
        dist.all_reduce(result, op=dist.ReduceOp.SUM, group=self._group)
        return result

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum over ranks."""
        result = values.clone()
        dist.all_reduce(result, op=dist.ReduceOp.MAX, group=self._group)
        return result

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Values of all ranks in rank order."""
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.index] = len(values)
        lengths = self.sum(lengths)
        # Collectives need equal shapes: pad to the longest, then cut.
        padded = values.new_zeros(int(lengths.max()))
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self._group)
        return torch.cat([part[:length] for part, length in zip(parts, lengths.tolist(), strict=True)])

    def broadcast(self, message: bytes) -> bytes:
        """The first rank's message, on every rank."""
        length = torch.tensor([len(message)], dtype=torch.int64)
        dist.broadcast(length, group=self._group, group_src=0)
        values = _values(message) if self.index == 0 else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(values, group=self._group, group_src=0)
        return values.numpy().tobytes()

    def all_gather(self, message: bytes) -> list[bytes]:
        """The messages of all ranks in rank order."""
        values = _values(message)
        lengths = self.gather(torch.tensor([len(message)], dtype=torch.int64)).tolist()
        return [part.numpy().tobytes() for part in self.gather(values).split(lengths)]

    def send(self, data: bytes | memoryview, *, to: int) -> None:
        """Hand `data` to one rank, which calls `receive` for as many bytes; returns once it has them."""
        dist.send(_values(data), group=self._group, group_dst=to)

    def receive(self, num_bytes: int, *, source: int) -> memoryview:
        """What `source` sends to this rank."""
        values = torch.empty(num_bytes, dtype=torch.uint8)
        dist.recv(values, group=self._group, group_src=source)
        return values.numpy().data


def _values(data: bytes | memoryview) -> torch.Tensor:
    """A copy, because torch wants memory that it may write to."""
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
