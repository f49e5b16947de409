"""The bytes that a weight version consists of, taken from a policy model.

Owns the map of the models that we train to Hugging Face tensors, and the buffers that a rank's rows are copied
to. Invariant: the values are the model's own, bit for bit (they are bf16 already), and the copies share no
memory with the model, so publishing may go on beside the next step. This copy is all that the training thread
does for a version; a buffer that was published is used again, so no step makes a new one. Called by the
learner after a committed step.
"""

import math
import threading
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from astraflow_trainer.model.hf_layout import (
    HeldTensor,
    ModelLayout,
    ParameterLayout,
    alike,
    held_tensors,
    stacked,
)
from astraflow_trainer.model.model import PackedModel, PolicyModel, local_part
from astraflow_trainer.publish.publishing import ModelBytes
from astraflow_weights.codec.shards import Shard as PublishedShard
from astraflow_weights.codec.shards import ShardedModel
from astraflow_weights.codec.tensors import Model, flat_unsigned

# Models whose experts are stacked here and apart in their checkpoints, by `model_type` of their configuration.
_EXPERTS_APART = frozenset({"qwen2_moe", "qwen3_moe"})
_EXPERTS = ".mlp.experts."


class HeldPart:
    """What this rank holds of a policy's Hugging Face tensors, and where it lies in the parameters."""

    def __init__(self, policy: PackedModel, *, publishes: bool = True) -> None:
        """Without `publishes`, as in all replicas but the first, `tensors` are none: others hold the same.

        Raises ValueError for a model without a map, and for parameters that are not sharded by rows.
        """
        layout = policy_layout(policy)
        self.specs = layout.specs
        self.parameters: Mapping[str, nn.Parameter] = dict(policy.hf_parameters())
        ranges = {name: _range(parameter) for name, parameter in self.parameters.items()}
        self.tensors: Mapping[str, HeldTensor] = held_tensors(layout, ranges) if publishes else {}

    @property
    def num_elements(self) -> int:
        """Elements of all tensors that are held here."""
        return sum(held.count for held in self.tensors.values())

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return local_part(next(iter(self.parameters.values()))).device

    def copy_to(self, flat: torch.Tensor) -> None:
        """Write all tensors, one after the other by name, to `flat` (bfloat16); waits for a device."""
        at = 0
        for name, held in self.tensors.items():
            self.copy_range(name, 0, flat[at : at + held.count])
            at += held.count
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.no_grad()
    def copy_range(self, name: str, first: int, out: torch.Tensor) -> None:
        """Write the held elements of a tensor from `first` on to `out` (bfloat16, any device), without waiting."""
        at, last = 0, first + len(out)
        for parameter, start, count in self.tensors[name].sources:
            low, high = max(first, at), min(last, at + count)
            if low < high:
                values = local_part(self.parameters[parameter]).reshape(-1)[
                    start + low - at : start + high - at
                ]
                # Narrowed where the parameter lives: half of the bytes cross to the host.
                bits = values if values.device == out.device else values.to(torch.bfloat16)
                out[low - first : high - first].copy_(bits, non_blocking=True)
            at += count

    def by_parameter(self, model: ShardedModel) -> dict[str, torch.Tensor]:
        """The values of shards that were published by as many ranks, flat bfloat16 by parameter; zeros where this rank
        publishes none.
        """
        sizes = {name: local_part(parameter).numel() for name, parameter in self.parameters.items()}
        weights = {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in sizes.items()}
        for name, held in self.tensors.items():
            at, bits = 0, torch.from_numpy(model.shards[name].elements).view(torch.bfloat16)
            for parameter, start, count in held.sources:
                weights[parameter][start : start + count] = bits[at : at + count]
                at += count
        return {name: values.to(self.device) for name, values in weights.items()}

    def shards(self, flat: torch.Tensor) -> ShardedModel:
        """The tensors in `flat`, filled by `copy_to`, without a copy."""
        bits = flat.view(torch.uint16).numpy()
        shards, at = {}, 0
        for name, held in self.tensors.items():
            shards[name] = PublishedShard(start=held.start, elements=bits[at : at + held.count])
            at += held.count
        return ShardedModel(specs=self.specs, shards=shards)


class WeightCopies:
    """Copies of a rank's weights. `take` is for the training thread; what it gives is released by any thread."""

    def __init__(self, policy: PolicyModel, *, publishes: bool = True) -> None:
        self.held = HeldPart(policy, publishes=publishes)
        self._lock = threading.Lock()
        self._free: list[torch.Tensor] = []

    def take(self) -> ModelBytes:
        """Copy the weights to a buffer that is not in use."""
        with self._lock:
            buffer = self._free.pop() if self._free else None
        if buffer is None:
            buffer = host_buffer(self.held)
        self.held.copy_to(buffer)
        return ModelBytes(open=partial(self.held.shards, buffer), published=lambda _: self._release(buffer))

    def _release(self, buffer: torch.Tensor) -> None:
        with self._lock:
            self._free.append(buffer)


def policy_layout(policy: PackedModel) -> ModelLayout:
    """The Hugging Face tensors of a policy. Raises ValueError for stacked experts that have no map."""
    apart = policy.causal_lm.config.model_type in _EXPERTS_APART
    return ModelLayout(
        _parameter_layout(name, tuple(parameter.shape), experts_apart=apart)
        for name, parameter in policy.hf_parameters()
    )


def same_shards(model: Model, like: HeldPart) -> ShardedModel:
    """The elements of a whole model that `like` holds of its own; only these are copied."""
    shards = {
        name: PublishedShard(
            start=held.start, elements=flat_unsigned(model[name])[held.start : held.start + held.count].copy()
        )
        for name, held in like.tensors.items()
    }
    return ShardedModel(specs=like.specs, shards=shards)


def _parameter_layout(name: str, shape: tuple[int, ...], *, experts_apart: bool) -> ParameterLayout:
    if len(shape) != 3 or ".experts." not in name:
        return alike(name, shape)
    owner, _, kind = name.partition(_EXPERTS)
    rows = _EXPERT_ROWS.get(kind)
    if not experts_apart or rows is None:
        raise ValueError(
            f"parameter {name!r} stacks experts, and it is not known how their checkpoints name them; add this kind "
            "of model to `published.policy_layout`"
        )
    experts = [
        [(f"{owner}{_EXPERTS}{expert}.{tensor}.weight", number) for tensor, number in rows(shape[1])]
        for expert in range(shape[0])
    ]
    return stacked(name, shape, experts)


_EXPERT_ROWS: Mapping[str, Callable[[int], list[tuple[str, int]]]] = {
    "gate_up_proj": lambda rows: [("gate_proj", rows // 2), ("up_proj", rows // 2)],
    "down_proj": lambda rows: [("down_proj", rows)],
}


def host_buffer(held: HeldPart) -> torch.Tensor:
    """Memory for everything held; pinned where a device copies to it, which is several times faster."""
    return torch.empty(held.num_elements, dtype=torch.bfloat16, pin_memory=held.device.type == "cuda")


def _range(parameter: torch.Tensor) -> tuple[int, int]:
    """The elements [start, stop) of the flat parameter that this rank holds."""
    count = local_part(parameter).numel()
    if not isinstance(parameter, DTensor):
        return 0, count
    placements = parameter.placements
    if any(isinstance(placement, Shard) and placement.dim != 0 for placement in placements):
        raise ValueError(
            f"a parameter is sharded as {placements}; shards must be rows (axis 0) to be published"
        )
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, placements)
    start = (int(offset[0]) if offset else 0) * math.prod(parameter.shape[1:])
    return start, start + count
