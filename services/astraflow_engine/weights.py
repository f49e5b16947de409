"""Checkpoint tensors: reading safetensors, verifying them, and laying them out for the forward pass.

Invariant: a `Weights` value is complete, finite and of the configured shapes, or it does not exist; reading
never touches the tensors that are being served. Numbers are rounded to bf16 (what a trainer publishes) and
computed in fp32, so log-probs agree with a trainer that runs its forward pass on the same rounded weights.
Called at start-up and for every weight update, on a thread other than the scheduler's.

Shape legend: D hidden, F intermediate, V vocabulary, Q heads x head_dim, K kv heads x head_dim, H head_dim.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from astraflow_engine.errors import ModelError
from astraflow_engine.linear import Linear
from astraflow_engine.model_config import DOWN, GATE_UP, OUTPUT, QKV, ModelConfig

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_FREQUENCIES = ".self_attn.rotary_emb.inv_freq"
_MAX_LISTED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer, fp32; q|k|v and gate|up are one product each. None is what the model does not have."""

    attention_norm_D: torch.Tensor
    qkv: Linear
    query_key_norm: torch.Tensor | None
    """[heads + kv heads, head_dim]: the query norm repeated per head, then the key norm."""
    output: Linear
    mlp_norm_D: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """All tensors of one weight version, fp32."""

    embedding_VD: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm_D: torch.Tensor
    head: Linear
    """Logits; a layout of its own, so a tied head is a copy of the embedding."""

    @property
    def num_bytes(self) -> int:
        """Resident bytes of these tensors."""
        held: list[torch.Tensor | Linear | None] = [self.embedding_VD, self.norm_D, self.head]
        held += [getattr(layer, name) for layer in self.layers for name in layer.__slots__]
        return sum(
            item.num_bytes if isinstance(item, Linear) else item.nbytes for item in held if item is not None
        )


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a checkpoint of this architecture must hold."""
    D, F, V, H = config.hidden_size, config.intermediate_size, config.vocab_size, config.head_dim
    Q, K = config.num_heads * H, config.num_kv_heads * H
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (D,),
        "post_attention_layernorm.weight": (D,),
        "self_attn.q_proj.weight": (Q, D),
        "self_attn.k_proj.weight": (K, D),
        "self_attn.v_proj.weight": (K, D),
        "self_attn.o_proj.weight": (D, Q),
        "mlp.gate_proj.weight": (F, D),
        "mlp.up_proj.weight": (F, D),
        "mlp.down_proj.weight": (D, F),
    }
    layer |= {f"{name}.bias": layer[f"{name}.weight"][:1] for name in config.biased}
    if config.query_key_norm:
        layer |= {"self_attn.q_norm.weight": (H,), "self_attn.k_norm.weight": (H,)}
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (V, D), "model.norm.weight": (D,)}
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes if config.tied_embeddings else shapes | {_HEAD: (V, D)}


def load_weights(folder: Path, *, config: ModelConfig) -> Weights:
    """Read a checkpoint folder (one safetensors file or an indexed set) into fresh tensors.

    Raises ModelError naming the tensor at fault: missing, unknown, of another shape or type, or not finite.
    """
    shapes = expected_shapes(config)
    tensors: dict[str, torch.Tensor] = {}
    for file in _files(folder):
        for name, tensor in read_tensors(file):
            # A tied checkpoint may still carry the head; Hugging Face ties it to the embedding as well. Early Llama
            # checkpoints carry the frequencies that follow from the config.
            if (config.tied_embeddings and name == _HEAD) or name.endswith(_FREQUENCIES):
                continue
            tensors[name] = checked(name, tensor, shapes=shapes, file=file)
    missing = sorted(shapes.keys() - tensors.keys())
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} of {len(shapes)} tensors, first {missing[:_MAX_LISTED]}; "
            "write the whole checkpoint before announcing it"
        )
    return _arrange(tensors, config=config)


def _files(folder: Path) -> list[Path]:
    single, index = folder / _SINGLE_FILE, folder / _INDEX_FILE
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ModelError(
            f"{folder} holds neither {_SINGLE_FILE} nor {_INDEX_FILE}; give a safetensors checkpoint"
        )
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index} has no usable weight_map: {error}; write the checkpoint again") from error
    if any(Path(name).name != name for name in names):
        raise ModelError(f"{index} points outside its folder: {names}; write the checkpoint again")
    return [folder / name for name in names]


def read_tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one safetensors file. Raises ModelError."""
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - safe_open is no mapping
                yield name, opened.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} cannot be read: {error}; write the checkpoint again") from error


def checked(
    name: str, tensor: torch.Tensor, *, shapes: dict[str, tuple[int, ...]], file: Path
) -> torch.Tensor:
    """The tensor rounded to bf16 in fp32 storage of its own. Raises ModelError unless it is of its shape and finite."""
    wanted = shapes.get(name)
    if wanted is None:
        raise ModelError(
            f"{file}: tensor {name!r} is not part of the model; write a checkpoint of the served model"
        )
    if tuple(tensor.shape) != wanted:
        raise ModelError(
            f"{file}: tensor {name!r} has shape {tuple(tensor.shape)}, the served model needs {wanted}; "
            "restart the engine with the new model folder to change the architecture"
        )
    if not tensor.is_floating_point():
        raise ModelError(f"{file}: tensor {name!r} has type {tensor.dtype}, expected bf16, fp16 or fp32")
    if not bool(torch.isfinite(tensor).all()):
        raise ModelError(f"{file}: tensor {name!r} holds NaN or infinity; do not publish diverged weights")
    return tensor.to(torch.bfloat16).to(torch.float32)


def _arrange(tensors: dict[str, torch.Tensor], *, config: ModelConfig) -> Weights:
    embedding = tensors[_EMBEDDING]
    head = embedding if config.tied_embeddings else tensors[_HEAD]
    return Weights(
        embedding_VD=embedding,
        layers=tuple(
            _arrange_layer(tensors, index=index, config=config) for index in range(config.num_layers)
        ),
        norm_D=tensors["model.norm.weight"],
        head=Linear(head),
    )


def _arrange_layer(tensors: dict[str, torch.Tensor], *, index: int, config: ModelConfig) -> LayerWeights:
    def rows(*names: str, kind: str) -> torch.Tensor:
        return torch.cat([tensors.pop(f"model.layers.{index}.{name}.{kind}") for name in names])

    def linear(*names: str) -> Linear:
        bias = rows(*names, kind="bias") if names[0] in config.biased else None
        return Linear(rows(*names, kind="weight"), bias)

    def vector(name: str) -> torch.Tensor:
        return tensors.pop(f"model.layers.{index}.{name}.weight")

    norm = None
    if config.query_key_norm:
        queries = vector("self_attn.q_norm").expand(config.num_heads, -1)
        norm = torch.cat([queries, vector("self_attn.k_norm").expand(config.num_kv_heads, -1)])
    return LayerWeights(
        attention_norm_D=vector("input_layernorm"),
        qkv=linear(*QKV),
        query_key_norm=norm,
        output=linear(OUTPUT),
        mlp_norm_D=vector("post_attention_layernorm"),
        gate_up=linear(*GATE_UP),
        down=linear(DOWN),
    )
