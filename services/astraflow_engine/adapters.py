"""LoRA adapters: low-rank additions to the products of the served model, each row of a pass under its own.

Invariant: an `Adapter` that exists is complete, finite and of the served model's shapes; what would change the
arithmetic beyond B·A·scale is refused by field. Numbers are rounded to bf16 and computed in fp32, as the model's are.
Loaded by `service`, applied by `model`.

Shape legend: B rows, R rank, I inputs, O outputs of a product.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import torch
import torch.nn.functional as F

from astraflow_engine.errors import ModelError
from astraflow_engine.model_config import DOWN, GATE_UP, OUTPUT, QKV, ModelConfig
from astraflow_engine.weights import checked, expected_shapes, read_tensors

_CONFIG_FILE = "adapter_config.json"
_PREFIX = "base_model.model."
_PRODUCTS: Mapping[str, tuple[str, ...]] = {
    "qkv": QKV,
    "output": (OUTPUT,),
    "gate_up": GATE_UP,
    "down": (DOWN,),
}
# What a value other than these would add is not computed here.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """What an adapter adds to one product of a layer."""

    down_RI: torch.Tensor
    up_OR: torch.Tensor
    """Scaled."""

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """[..., I] to [..., O], fresh memory."""
        return F.linear(F.linear(values, self.down_RI), self.up_OR)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """The additions of every layer, by the name of the product (`qkv`, `output`, `gate_up`, `down`)."""

    path: Path
    serial: int = field(default_factory=count(1).__next__)
    """Of no other adapter of this process, one of the same name included."""
    layers: tuple[Mapping[str, LowRank], ...]


class RowAdapters:
    """Which adapters the rows of one pass have."""

    def __init__(self, adapters: Iterable[Adapter | None]) -> None:
        of_rows = list(adapters)
        rows: dict[Adapter, list[int]] = {}
        for row, adapter in enumerate(of_rows):
            if adapter is not None:
                rows.setdefault(adapter, []).append(row)
        self._groups = [
            (adapter, None if len(own) == len(of_rows) else torch.tensor(own))
            for adapter, own in rows.items()
        ]

    def add(self, product: torch.Tensor, values: torch.Tensor, *, layer: int, name: str) -> torch.Tensor:
        """Add to `product` [B, ..., O] in place, made of `values` [B, ..., I], what the rows' adapters add to it."""
        for adapter, rows in self._groups:
            low_rank = adapter.layers[layer].get(name)
            if low_rank is None:
                continue
            if rows is None:
                product.add_(low_rank(values))
            else:
                product.index_add_(0, rows, low_rank(values[rows]))
        return product


def load_adapter(folder: Path, *, config: ModelConfig) -> Adapter:
    """Read an adapter folder as peft writes it: a configuration, and safetensors of any file name.

    Raises ModelError naming the field or the tensor at fault.
    """
    rank, scale = _read_config(folder / _CONFIG_FILE)
    shapes: dict[str, tuple[int, ...]] = {
        f"{_PREFIX}{module}.{part}.weight": shape
        for name, wanted in expected_shapes(config).items()
        if (module := name.removesuffix(".weight")).endswith(tuple(sum(_PRODUCTS.values(), ())))
        for part, shape in (("lora_A", (rank, wanted[1])), ("lora_B", (wanted[0], rank)))
    }
    tensors = {
        name: checked(name, tensor, shapes=shapes, file=file)
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in read_tensors(file)
    }
    if not tensors:
        raise ModelError(f"{folder} holds no tensors of an adapter; write them as *.safetensors")
    return Adapter(
        path=folder,
        layers=tuple(
            _layer(tensors, shapes=shapes, index=index, scale=scale, folder=folder)
            for index in range(config.num_layers)
        ),
    )


def _read_config(path: Path) -> tuple[int, float]:
    """Rank and scale. Raises ModelError."""
    try:
        given = json.loads(path.read_text())
        rank, alpha = int(given["r"]), float(given["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} is no configuration of a LoRA adapter: {error!r}") from error
    for name, allowed in _NEUTRAL.items():
        if given.get(name, allowed[0]) not in allowed:
            raise ModelError(
                f"{path}: {name} is {given[name]!r}, the CPU engine adds plain LoRA only ({allowed[0]!r}); let nodes "
                "serve this model with SGLang: --engine sglang"
            )
    if not 1 <= rank <= 1024:
        raise ModelError(f"{path}: r is {rank}, expected 1 to 1024")
    return rank, alpha / rank


def _layer(
    tensors: Mapping[str, torch.Tensor],
    *,
    shapes: Mapping[str, tuple[int, ...]],
    index: int,
    scale: float,
    folder: Path,
) -> Mapping[str, LowRank]:
    found = {}
    for name, modules in _PRODUCTS.items():
        places = [f"{_PREFIX}model.layers.{index}.{module}" for module in modules]
        pairs = [
            (tensors.get(f"{place}.lora_A.weight"), tensors.get(f"{place}.lora_B.weight")) for place in places
        ]
        for place, (down, up) in zip(places, pairs, strict=True):
            if (down is None) != (up is None):
                raise ModelError(f"{folder} has one of {place}.lora_A and .lora_B only; write both")
        if all(down is None for down, _ in pairs):
            continue
        widths = [shapes[f"{place}.lora_B.weight"][0] for place in places]
        # Products are fused: what a module of one has no addition for gets rows of zeros.
        downs = [down for down, _ in pairs if down is not None]
        ups, at = torch.zeros(sum(widths), sum(len(down) for down in downs)), 0
        for start, width, (_, up) in zip(_starts(widths), widths, pairs, strict=True):
            if up is not None:
                ups[start : start + width, at : at + up.shape[1]] = up * scale
                at += up.shape[1]
        found[name] = LowRank(down_RI=torch.cat(downs), up_OR=ups)
    return found


def _starts(widths: list[int]) -> list[int]:
    return [sum(widths[:index]) for index in range(len(widths))]
