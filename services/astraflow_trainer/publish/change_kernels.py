"""Changed bf16 elements found on a GPU by two Triton kernels that read both copies about once.

The first marks in a bit for each element whether it differs and counts what each block holds; the second writes
positions and steps to where the counts before its block end, reading of both copies only what differs. Invariant:
what they give equals what `change_detection.changed` finds by torch operations. Imports triton, which comes with
torch for CUDA; `change_detection` asks `is_available` first.
"""

from importlib.util import find_spec
from typing import Any

import torch

_BLOCK = 4096
_LANES = 32


def is_available(device: torch.device) -> bool:
    """Whether tensors on the device can be compared so."""
    return device.type == "cuda" and find_spec("triton") is not None


def changed_by_kernels(new: torch.Tensor, old: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `change_detection.changed`, for any number of elements below 2^31; several times as fast for a multiple of 16
    at an address that is one of 16 bytes.
    """
    # Compiling needs triton as modules are loaded, and most machines have none.
    from astraflow_trainer.publish import change_triton

    count, device = len(new), new.device
    num_blocks = -(-count // _BLOCK)
    marks = torch.empty(num_blocks * _BLOCK // _LANES, dtype=torch.int32, device=device)
    counts = torch.empty(num_blocks, dtype=torch.int32, device=device)
    shape: dict[str, Any] = {"BLOCK": _BLOCK, "LANES": _LANES, "num_warps": 4}
    change_triton.mark[(num_blocks,)](new, old, marks, counts, count, **shape)
    ends = counts.cumsum(0)
    num_changed = int(ends[-1])
    positions = torch.empty(num_changed, dtype=torch.int32, device=device)
    steps = torch.empty(num_changed, dtype=torch.int16, device=device)
    change_triton.gather[(num_blocks,)](new, old, marks, ends, counts, positions, steps, **shape)
    return positions, steps
