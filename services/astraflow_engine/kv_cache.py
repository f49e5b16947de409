"""The static key/value cache: one row per slot, every row at its own length.

Invariant: positions below a row's length hold keys and values of that row's tokens; column `capacity` is a
dump for writes that belong to no token (padding, idle rows), so a forward pass never needs to branch per
row. Memory is allocated once and touched lazily: an unused slot costs address space, not RAM. Used only by
the scheduler thread.

Shape legend: L layers, S slots, K kv heads, T capacity + 1, H head_dim, B rows of a pass, N new tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch

from astraflow_engine.model_config import ModelConfig


class KvCache:
    """fp32 keys and values of all slots."""

    def __init__(self, config: ModelConfig, *, num_slots: int, capacity: int) -> None:
        self.num_slots = num_slots
        self.capacity = capacity
        shape = (config.num_layers, 2, num_slots, config.num_kv_heads, capacity + 1, config.head_dim)
        # numpy asks the system for zero pages; torch.zeros would write, and so occupy, all of them.
        self._kv_L2SKTH = torch.from_numpy(np.zeros(shape, dtype=np.float32))
        # Where column 0 of each (keys or values, slot, head) begins in a layer seen as rows of H numbers.
        starts = torch.arange(2 * num_slots * config.num_kv_heads) * (capacity + 1)
        self._starts_SK = starts.view(2, num_slots, config.num_kv_heads)

    def places(self, rows_B: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where tokens at `positions` [B] or [B, N] of the rows named go; the same for every layer."""
        starts = self._starts_SK[:, rows_B]
        return (
            (starts if positions.dim() == 1 else starts.unsqueeze(2)).add(positions.unsqueeze(-1)).flatten()
        )

    def write(self, layer: int, places: torch.Tensor, *, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the keys and values [B, K, H] or [B, N, K, H] of the tokens that `places` was made for."""
        head_dim = keys.shape[-1]
        rows = self._kv_L2SKTH[layer].view(-1, head_dim)
        rows.index_copy_(0, places, torch.stack((keys, values)).view(-1, head_dim))

    def leading_rows(self, layer: int, *, num_rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views [num_rows, K, length, H] of the first rows: no copy."""
        rows = self._kv_L2SKTH[layer, :, :num_rows, :, :length]
        return rows[0], rows[1]

    def gathered_rows(
        self, layer: int, *, rows_B: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies [B, K, length, H] of the rows named."""
        rows = self._kv_L2SKTH[layer, :, rows_B, :, :length]
        return rows[0], rows[1]

    def copy_row(self, source: int, *, targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of one row into other rows."""
        if not targets or length == 0:
            return
        prefix = self._kv_L2SKTH[:, :, source, None, :, :length]
        self._kv_L2SKTH[:, :, torch.tensor(targets), :, :length] = prefix

    def clear_row(self, row: int) -> None:
        """Zero a row. Masked columns still take part in sums, so one NaN left behind would spoil its
        successors."""
        self._kv_L2SKTH[:, :, row] = 0.0

    def exchange_rows(self, first: int, second: int, *, length: int) -> None:
        """Swap the first `length` positions of two rows."""
        kept = self._kv_L2SKTH[:, :, first, :, :length].clone()
        self._kv_L2SKTH[:, :, first, :, :length] = self._kv_L2SKTH[:, :, second, :, :length]
        self._kv_L2SKTH[:, :, second, :, :length] = kept
