"""The bytes that a weight version consists of, taken from a policy model.

Owns the map from parameters to Hugging Face tensor names and elements. Invariant: the values are the model's
own, bit for bit (they are bf16 already), each rank takes only the rows that it holds, and the arrays share no
memory with the model, so publishing may go on beside the next step. Called by the learner after a committed
step, on the training thread.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from astraflow_trainer.model import PolicyModel, local_part
from astraflow_weights.shards import Shard as PublishedShard
from astraflow_weights.shards import ShardedModel
from astraflow_weights.tensors import Model, TensorSpec, flat_unsigned


def published_shards(policy: PolicyModel) -> ShardedModel:
    """This rank's rows of every tensor as bf16 bit patterns; tied weights once. Nothing is communicated."""
    specs, shards = [], {}
    for name, parameter in sorted(policy.hf_parameters()):
        specs.append(TensorSpec(name=name, dtype="bfloat16", shape=tuple(parameter.shape)))
        bits = _bits(local_part(parameter))
        start = _first_row(parameter) * math.prod(parameter.shape[1:])
        if bits.size:
            shards[name] = PublishedShard(start=start, elements=bits.reshape(-1))
    return ShardedModel(specs=tuple(specs), shards=shards)


def same_shards(model: Model, like: ShardedModel) -> ShardedModel:
    """The elements of a whole model that `like` holds of its own; only these are copied."""
    shards = {
        spec.name: PublishedShard(
            start=shard.start, elements=flat_unsigned(model[spec.name])[shard.start : shard.stop].copy()
        )
        for spec, shard in like.held()
    }
    return ShardedModel(specs=like.specs, shards=shards)


@torch.no_grad()
def _bits(tensor: torch.Tensor) -> NDArray[np.uint16]:
    halves = tensor.detach().to("cpu", torch.bfloat16, copy=True)
    bits: NDArray[np.uint16] = halves.view(torch.uint16).numpy()
    return bits


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
