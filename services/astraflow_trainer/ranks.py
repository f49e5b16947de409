"""The ranks of one policy's trainer: what they agree on, behind one small interface.

Invariant: every method is a collective and gives all ranks the same answer, so guards and bounds derived from
it are taken alike everywhere. `OneRank` is the single process, `GroupRanks` a torch process group. Called by
the training step and the publisher; statistics are small CPU tensors whatever the device of the model.
"""

from typing import Protocol

import torch
import torch.distributed as dist


class Ranks(Protocol):
    """Agreement among the processes that train one policy."""

    @property
    def index(self) -> int:
        """This process, from 0."""

    @property
    def size(self) -> int:
        """Number of processes."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise sum over ranks; equal shapes everywhere."""

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum over ranks; equal shapes everywhere."""

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """One-dimensional values of all ranks in rank order; lengths may differ."""


class OneRank:
    """A trainer of one process: everything is already known."""

    index = 0
    size = 1

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
