"""How a model lies on the devices of its ranks: FSDP2 groups, what is computed in bf16, what is recomputed, what is
kept on the host, by what attention is computed, whether layers are compiled.

Invariant: none of it changes what is published, and recomputing changes no bit of a gradient. With one rank, or on a
CPU, the layout is the same. Called by the learner.
"""

import shutil
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from astraflow.errors import InvalidArgumentError
from astraflow_kit.log import get_logger
from astraflow_trainer.model.attention import kernel_for
from astraflow_trainer.model.model import CriticModel, PackedModel, PolicyModel
from astraflow_trainer.settings import TrainerSettings

log = get_logger(__name__)

Compute = Literal["fp32", "bf16"]
Recompute = Literal["none", "selective", "full"]
Attention = Literal["auto", "mask"]
_BACKEND = "inductor"
_KEPT = (
    "aten.mm.",
    "aten.addmm.",
    "aten.bmm.",
    "aten._scaled_dot_product",
    "torch_attn._varlen_attn",
    "flash_attn._flash_attn_varlen_forward",
)
"""Operators whose results a layer with selective recomputing keeps: matrix products and attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What may differ from machine to machine; the numbers of a step may only by `compute`."""

    compute: Compute = "fp32"
    """Arithmetic of the forward and the backward pass; gradients are added up in fp32 either way."""
    recompute: Recompute = "none"
    """What of a decoder layer the backward pass computes again: nothing, all but products and attention, everything."""
    offload: bool = False
    """Whether masters, moments and gradients are on the host and cross to the device layer by layer."""
    attention: Attention = "auto"
    """How rows of a lane are kept apart: by a kernel for pieces where the device has one, or always by a mask."""
    compiled: bool = False
    """Whether decoder layers are compiled by torch, each as it is first computed."""


def compute_of(wanted: Literal["auto", "fp32", "bf16"], *, on_gpu: bool) -> Compute:
    """What a recipe's `trainer.compute` is there. On a CPU bf16 costs agreement with the engine and saves no time."""
    if wanted != "auto":
        return wanted
    return "bf16" if on_gpu else "fp32"


def placement_of(settings: TrainerSettings, *, compute: Compute = "fp32") -> Placement:
    """What the settings say of how a model lies on the devices; the recipe says what it computes in."""
    return Placement(
        compute=compute,
        recompute=settings.activation_checkpointing,
        offload=settings.offload,
        attention=settings.attention,
        compiled=settings.compile,
    )


def shard(policy: PackedModel, *, mesh: DeviceMesh, placement: Placement | None = None) -> None:
    """Apply FSDP2 in place: one group per decoder layer, one for an embedding that is not the head's, too, and one for
    the rest.

    With bf16 compute the parameters become the fp32 masters: they are rounded to bf16, to the bits that are published,
    whenever they are gathered. Frozen parameters are kept in bf16 then. A critic's are the masters in any case. Raises
    InvalidArgumentError for offload without a GPU.
    """
    placement = placement or Placement()
    decoder = policy.causal_lm.get_decoder()
    for layer in decoder.layers:
        set_recompute(layer, placement.recompute)
    precision, offload = MixedPrecisionPolicy(), OffloadPolicy()
    if placement.compute == "bf16":
        _narrow_frozen(policy)
        # Inputs are as they should be: a temperature of 0.7 would become 0.69921875.
        precision = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    if placement.offload:
        if mesh.device_type == "cpu":
            raise InvalidArgumentError(
                "ASTRAFLOW_OFFLOAD is true, and this rank computes on the CPU, where everything is in host memory "
                "anyway; take it away"
            )
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    groups = list(decoder.layers)
    embedding = policy.causal_lm.get_input_embeddings()
    if embedding.weight is not policy.causal_lm.get_output_embeddings().weight:
        groups.append(embedding)
    for module in [*groups, policy]:
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload)
    if placement.compiled:
        policy.compiler = _compile(decoder.layers, device_type=mesh.device_type)
    if isinstance(policy, PolicyModel):
        register_fsdp_forward_method(policy, "next_token_logprobs")
    policy.holds_masters = placement.compute == "bf16" or isinstance(policy, CriticModel)
    policy.device = _device_of(mesh)
    dtype = torch.bfloat16 if placement.compute == "bf16" else torch.float32
    kernel = kernel_for(policy.device, dtype=dtype) if placement.attention == "auto" else None
    if kernel is not None:
        policy.attend_by(*kernel)


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _narrow_frozen(policy: PackedModel) -> None:
    for parameter in policy.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)


def _compile(layers: torch.nn.ModuleList, *, device_type: str) -> str | None:
    """Compile the forward pass of each layer with its recomputing, inside FSDP's hooks: one graph for all layers of a
    kind and all sizes of micro-batches. The backend that does it; None where this machine has none.
    """
    lacks = _lacks_to_compile(device_type)
    if lacks:
        log.warning("model.not_compiled", lacks=lacks, remedy="install it, or set ASTRAFLOW_COMPILE to false")
        return None
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=_BACKEND)
    return _BACKEND


def _lacks_to_compile(device_type: str) -> str:
    """What torch's compiler needs and this machine does not have; empty where it has all."""
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        return "a C++ compiler (c++, g++ or clang++) on the PATH"
    return "the package triton" if device_type == "cuda" and find_spec("triton") is None else ""


def set_recompute(layer: torch.nn.Module, what: Recompute) -> None:
    """Let a layer's backward pass compute `what` again. Layers of transformers ask these two attributes;
    `model.gradient_checkpointing_enable` would set the first on modules outside the layers, too.
    """
    if what == "none":
        return
    again: partial[Any] = partial(checkpoint, use_reentrant=False)
    if what == "selective":
        again = partial(again, context_fn=partial(create_selective_checkpoint_contexts, _products_are_kept))
    attributes: Any = layer
    attributes.gradient_checkpointing = True
    attributes._gradient_checkpointing_func = again


def _products_are_kept(
    _context: object, operator: object, *_args: object, **_kwargs: object
) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_kept(operator) else CheckpointPolicy.PREFER_RECOMPUTE


def is_kept(operator: object) -> bool:
    """Whether a layer with selective recomputing keeps what this operator of torch gives."""
    return str(operator).startswith(_KEPT)
