"""Attention over the rows of packed lanes, one after the other: no mask, no product that is thrown away.

A micro-batch's lanes are one long column of tokens, cut at every row and at every lane's padding; a kernel attends
within each piece. Invariant: what a row's tokens read is what the mask of `packing.attention_mask` lets them read;
padding attends to itself and is read by nobody. Registered with transformers' attention interface, so models are
unchanged. The kernels (torch's own, or flash-attn where that is installed) compute in half precision on a GPU;
everywhere else the mask stays. Called by the policy model.

Shape legend: B lanes, L tokens of a lane, T = B·L, H heads, K heads of keys and values, D of a head, P pieces.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
    """Where the pieces of a micro-batch's column begin and end."""

    borders_P1: torch.Tensor
    """int32[P + 1]: 0, the end of each piece, the last being T."""
    longest: int
    """Tokens of the longest piece."""

    def arguments(self, move: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        """As transformers names them, once more for keys; `move` takes the borders to the device."""
        borders = move(self.borders_P1)
        ends = {"max_length_q": self.longest, "max_length_k": self.longest}
        return {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, **ends}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reading:
    """What a token reads: its piece up to itself."""

    borders_P1: torch.Tensor
    """Those of `Pieces`, on the device."""
    longest: int
    """Tokens of the longest piece."""
    scale: float | None = None
    """Of the products of queries and keys; None is D to the power of −1/2."""
    window: int | None = None
    """The last so many tokens alone, itself included; None: all."""

    @property
    def beside(self) -> tuple[int, int]:
        """Tokens before and after that are read beside a token itself; −1 is all of them."""
        return (-1 if self.window is None else self.window - 1, 0)


class Kernel(Protocol):
    """Causal attention within each piece."""

    def __call__(
        self, query_THD: torch.Tensor, key_TKD: torch.Tensor, value_TKD: torch.Tensor, reading: Reading
    ) -> torch.Tensor:
        """[T, H, D]."""


def pieces(document_ids_BL: torch.Tensor) -> Pieces:
    """The pieces of lanes whose documents are numbered so: a new one at each lane and wherever the number changes."""
    begins_BL = torch.ones_like(document_ids_BL, dtype=torch.bool)
    begins_BL[:, 1:] = document_ids_BL[:, 1:] != document_ids_BL[:, :-1]
    starts = begins_BL.flatten().nonzero()[:, 0]
    borders = torch.cat([starts, torch.tensor([document_ids_BL.numel()])]).to(torch.int32)
    return Pieces(borders_P1=borders, longest=int(borders.diff().max()))


def use_kernel(causal_lm: transformers.PreTrainedModel, kernel: Kernel, *, name: str) -> None:
    """Let a model attend by `kernel` where it is given pieces; without them as it did before."""
    interface = f"astraflow_{name}"
    transformers.AttentionInterface.register(interface, partial(_attend, kernel=kernel))
    causal_lm.config.get_text_config()._attn_implementation = interface


def kernel_for(device: torch.device, *, dtype: torch.dtype) -> tuple[str, Kernel] | None:
    """The fastest kernel for a model that computes on `device` in `dtype`; None where only a mask will do."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    if torch.cuda.get_device_capability(device) < (8, 0):
        return None
    return ("flash_attn", flash_attn) if find_spec("flash_attn") else ("varlen", torch_varlen)


def torch_varlen(
    query_THD: torch.Tensor, key_TKD: torch.Tensor, value_TKD: torch.Tensor, reading: Reading
) -> torch.Tensor:
    """`torch.nn.attention.varlen`, a part of torch."""
    from torch.nn.attention.varlen import varlen_attn

    read = varlen_attn(
        query_THD,
        key_TKD,
        value_TKD,
        reading.borders_P1,
        reading.borders_P1,
        reading.longest,
        reading.longest,
        scale=reading.scale,
        window_size=reading.beside,
        enable_gqa=query_THD.shape[1] != key_TKD.shape[1],
    )
    assert isinstance(read, torch.Tensor)
    return read


def flash_attn(
    query_THD: torch.Tensor, key_TKD: torch.Tensor, value_TKD: torch.Tensor, reading: Reading
) -> torch.Tensor:
    """The package of that name."""
    read: torch.Tensor = import_module("flash_attn").flash_attn_varlen_func(
        query_THD,
        key_TKD,
        value_TKD,
        reading.borders_P1,
        reading.borders_P1,
        reading.longest,
        reading.longest,
        softmax_scale=reading.scale,
        causal=True,
        window_size=reading.beside,
    )
    return read


def _attend(
    module: torch.nn.Module,
    query_BHLD: torch.Tensor,
    key_BKLD: torch.Tensor,
    value_BKLD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    kernel: Kernel,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in place of its own attention; [B, L, H, D]."""
    if cu_seq_lens_q is None or max_length_q is None:
        plain: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query_BHLD, key_BKLD, value_BKLD, attention_mask, scaling=scaling, **others
        )
        return plain
    num_lanes, _, lane_tokens, _ = query_BHLD.shape
    query, key, value = (part.transpose(1, 2).flatten(0, 1) for part in (query_BHLD, key_BKLD, value_BKLD))
    reading = Reading(borders_P1=cu_seq_lens_q, longest=max_length_q, scale=scaling, window=sliding_window)
    read_THD = kernel(query, key, value, reading)
    return read_THD.unflatten(0, (num_lanes, lane_tokens)), None
