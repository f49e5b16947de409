"""The bytes that a weight version consists of, taken from a policy model.

Owns the map from parameters to Hugging Face tensor names and rows. Invariant: the values are the model's own,
bit for bit (they are bf16 already), and the arrays share no memory with it, so publishing may go on beside
the next step. Called by the loop after a committed step, on the training thread.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from astraflow_trainer.model import PolicyModel, local_part


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorShard:
    """The rows of one tensor that this rank publishes."""

    name: str
    """Hugging Face tensor name."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    first_row: int
    """Where `bits` begins along axis 0."""
    bits: NDArray[np.uint16]
    """bf16 bit patterns, uint16[rows, *shape[1:]]."""


def published_tensors(policy: PolicyModel) -> dict[str, NDArray[np.uint16]]:
    """Every tensor whole, as bf16 bit patterns by Hugging Face name; tied weights once.

    A collective when the model is sharded over several ranks; with one rank only memory is copied.
    """
    return {name: _bits(_whole(parameter)) for name, parameter in policy.hf_parameters()}


def published_shards(policy: PolicyModel) -> list[TensorShard]:
    """The part of each tensor that this rank holds; empty parts are left out. Nothing is communicated."""
    shards = []
    for name, parameter in policy.hf_parameters():
        bits = _bits(local_part(parameter))
        if bits.size:
            shape = tuple(parameter.shape)
            shards.append(TensorShard(name=name, shape=shape, first_row=_first_row(parameter), bits=bits))
    return shards


@torch.no_grad()
def _bits(tensor: torch.Tensor) -> NDArray[np.uint16]:
    halves = tensor.detach().to("cpu", torch.bfloat16, copy=True)
    bits: NDArray[np.uint16] = halves.view(torch.uint16).numpy()
    return bits


@torch.no_grad()
def _whole(parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return parameter
    if parameter.device_mesh.size() == 1:
        return parameter.to_local()
    return parameter.full_tensor()


def _first_row(parameter: torch.Tensor) -> int:
    if not isinstance(parameter, DTensor):
        return 0
    placements = parameter.placements
    if any(isinstance(placement, Shard) and placement.dim != 0 for placement in placements):
        raise ValueError(
            f"a parameter is sharded as {placements}; shards must be rows (axis 0) to be published"
        )
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, placements)
    return int(offset[0]) if offset else 0
