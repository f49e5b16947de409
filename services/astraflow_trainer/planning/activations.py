"""What a forward pass keeps for the backward pass, found by running it without memory.

Invariant: nothing is computed and no weight exists: two models of one and of two layers are run on the meta device,
and what autograd keeps is counted, so a new kind of model needs no formula. Attention is a stand-in that keeps what
kernels keep. Called by the memory plan.

Shape legend: T tokens, H heads, D of a head.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from astraflow_trainer.model.attention import Reading
from astraflow_trainer.model.model import PolicyModel, empty_of
from astraflow_trainer.model.sharding import Recompute, is_kept, set_recompute

if TYPE_CHECKING:
    import transformers

_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Bytes for each token of a micro-batch."""

    layer: float
    """Kept of a decoder layer until its backward pass."""
    layer_again: float
    """Of a layer whose backward pass is being computed, where it computes again what was not kept."""
    others: float
    """Kept outside the layers: hidden states before and after, log-probs and entropies."""


def activations_of(
    config: transformers.PreTrainedConfig, *, dtype: torch.dtype, recompute: Recompute
) -> Activations:
    """Of a model with this configuration, computed in `dtype`, all of whose tokens are trained."""
    one, two = (_kept(config, num_layers=layers, dtype=dtype, recompute="none") for layers in (1, 2))
    whole, others = two - one, 2 * one - two
    if recompute == "none":
        return Activations(layer=whole, layer_again=0.0, others=others)
    one, two = (_kept(config, num_layers=layers, dtype=dtype, recompute=recompute) for layers in (1, 2))
    return Activations(layer=two - one, layer_again=whole - (two - one), others=others)


def _kept(
    config: transformers.PreTrainedConfig, *, num_layers: int, dtype: torch.dtype, recompute: Recompute
) -> float:
    fewer = copy.deepcopy(config)
    text = fewer.get_text_config()
    text.num_hidden_layers = num_layers
    if hasattr(text, "num_experts"):
        # What else computes experts looks at which tokens go where, which nobody knows without memory.
        text._experts_implementation = "grouped_mm"
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:num_layers]
    policy = PolicyModel(empty_of(fewer, dtype=dtype)).train().to("meta")
    for layer in policy.causal_lm.get_decoder().layers:
        set_recompute(layer, recompute)
    tokens = torch.arange(_TOKENS, device="meta")
    with _counted(policy) as kept, _Products(kept if recompute == "selective" else {}) as products:
        policy.attend_by("planned", partial(_stand_in, products=products))
        policy(
            token_ids_BL=tokens[None],
            position_ids_BL=tokens[None],
            attention_mask_B1LL=None,
            source_N=tokens,
            target_N=tokens,
            temperature_N=torch.ones(_TOKENS, device="meta"),
            cu_seq_lens_q=torch.zeros(2, dtype=torch.int32, device="meta"),
            max_length_q=_TOKENS,
        )
        return sum(storage.nbytes() for storage in kept.values()) / _TOKENS


@contextmanager
def _counted(policy: PolicyModel) -> Iterator[dict[int, torch.UntypedStorage]]:
    """The storages that autograd keeps within the block, apart from parameters."""
    own = {parameter.untyped_storage()._cdata for parameter in policy.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


@dataclass(eq=False)
class _Products(TorchDispatchMode):
    """Adds what a selective layer keeps to `kept`."""

    kept: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if is_kept(func) and isinstance(result, torch.Tensor):
            self.keep(result)
        return result

    def keep(self, values: torch.Tensor) -> None:
        """Count a tensor as one that is kept."""
        storage = values.untyped_storage()
        self.kept[storage._cdata] = storage


class _Attention(torch.autograd.Function):
    """Keeps queries, keys, values, what was read, and a number for each token and head."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context object has no public type
        query_THD: torch.Tensor,
        key_TKD: torch.Tensor,
        value_TKD: torch.Tensor,
    ) -> torch.Tensor:
        read_THD = torch.empty_like(query_THD)
        normaliser_TH = torch.empty(query_THD.shape[:2], device=query_THD.device)
        ctx.save_for_backward(query_THD, key_TKD, value_TKD, read_THD, normaliser_TH)
        return read_THD

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> None:  # noqa: ANN401 - as above
        raise AssertionError("a plan computes no gradient")


def _stand_in(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    _: Reading,
    *,
    products: _Products,
) -> torch.Tensor:
    read: torch.Tensor = _Attention.apply(query_THD, key_TKD, value_TKD)  # type: ignore[no-untyped-call]
    products.keep(read)
    return read
