"""The architecture of the served model, read from a Hugging Face `config.json`.

Owns the decision which checkpoints this engine can serve exactly: dense models of the Llama, Qwen2 and Qwen3
families with full attention, and rotary embeddings that do not depend on the length of a sequence. Anything
else is refused with the field at fault instead of being served approximately. Called at start-up; a weight
update keeps the architecture and only brings tensors.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from astraflow_engine.errors import ModelError
from astraflow_engine.rotary import LinearScaling, Llama3Scaling, Rope, YarnScaling

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OUTPUT = "self_attn.o_proj"
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
DOWN = "mlp.down_proj"
"""The projections of a layer, as checkpoints name them."""

# What `architectures` says, by `model_type`.
_FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_REMEDY = "let nodes serve this model with SGLang: --engine sglang"
# Fields whose other values change the arithmetic.
_REQUIRED: Mapping[str, object] = {
    "hidden_act": "silu",
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of a dense model. Counts unless the name says otherwise."""

    model_type: str
    """`llama`, `qwen2` or `qwen3`."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: Rope
    max_positions: int
    tied_embeddings: bool
    query_key_norm: bool
    """Queries and keys are normed per head before they are rotated."""
    biased: frozenset[str]
    """The projections that add a bias."""
    eos_token_ids: frozenset[int]

    @property
    def architecture(self) -> str:
        """The class that Hugging Face loads such a checkpoint with."""
        return _FAMILIES[self.model_type]


def load_model_config(folder: Path) -> ModelConfig:
    """Read and verify `folder/config.json`. Raises ModelError when it is missing or cannot be served."""
    fields = _read_json(folder / "config.json")
    _refuse_what_is_not_served(fields, folder=folder)
    model_type, num_heads = str(fields["model_type"]), _count(fields, "num_attention_heads")
    max_positions = _count(fields, "max_position_embeddings")
    config = ModelConfig(
        model_type=model_type,
        vocab_size=_count(fields, "vocab_size"),
        hidden_size=_count(fields, "hidden_size"),
        num_layers=_count(fields, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_count(fields, "num_key_value_heads", default=num_heads),
        head_dim=_head_dim(fields, num_heads=num_heads),
        intermediate_size=_count(fields, "intermediate_size"),
        rms_norm_eps=_positive(fields, "rms_norm_eps", default=1e-6),
        rope=_rope(fields, max_positions=max_positions),
        max_positions=max_positions,
        tied_embeddings=_flag(fields, "tie_word_embeddings"),
        query_key_norm=model_type == "qwen3",
        biased=_biased(fields, model_type=model_type),
        eos_token_ids=_eos_token_ids(fields, folder=folder),
    )
    _verify_shape(config)
    return config


def _refuse_what_is_not_served(fields: Mapping[str, object], *, folder: Path) -> None:
    model_type = fields.get("model_type")
    if str(model_type) not in _FAMILIES:
        raise ModelError(
            f"{folder}/config.json: model_type is {model_type!r}, the CPU engine serves dense models of the "
            f"families {', '.join(_FAMILIES)}; {_REMEDY}"
        )
    for name, wanted in _REQUIRED.items():
        if fields.get(name, wanted) != wanted:
            raise ModelError(
                f"{folder}/config.json: {name} is {fields[name]!r}, the CPU engine serves only {wanted!r}; {_REMEDY}"
            )
    layer_types = fields.get("layer_types") or []
    kinds = layer_types if isinstance(layer_types, list) else [layer_types]
    others = [kind for kind in kinds if kind != "full_attention"]
    if others:
        raise ModelError(
            f"{folder}/config.json: layer_types has {others[0]!r}, the CPU engine serves only 'full_attention'; "
            f"{_REMEDY}"
        )


def _biased(fields: Mapping[str, object], *, model_type: str) -> frozenset[str]:
    if model_type == "qwen2":
        return frozenset(QKV)
    attention = {*QKV, OUTPUT} if _flag(fields, "attention_bias") else set()
    feed_forward = {*GATE_UP, DOWN} if model_type == "llama" and _flag(fields, "mlp_bias") else set()
    return frozenset(attention | feed_forward)


def _head_dim(fields: Mapping[str, object], *, num_heads: int) -> int:
    hidden_size = _count(fields, "hidden_size")
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise ModelError(
            f"config.json: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}, and there "
            "is no head_dim; correct the config"
        )
    return _count(fields, "head_dim", default=hidden_size // num_heads)


def _verify_shape(config: ModelConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {config.num_heads} is not a multiple of num_key_value_heads "
            f"{config.num_kv_heads}; correct the config"
        )
    if config.head_dim % 2:
        raise ModelError(
            f"config.json: head_dim {config.head_dim} is odd; rotary embeddings need an even one"
        )
    beyond = sorted(token for token in config.eos_token_ids if not 0 <= token < config.vocab_size)
    if beyond:
        raise ModelError(
            f"config.json: eos_token_id {beyond} is outside the vocabulary of {config.vocab_size}"
        )


def _rope(fields: Mapping[str, object], *, max_positions: int) -> Rope:
    # transformers 5 writes `rope_parameters`; older checkpoints have `rope_theta` and `rope_scaling`, and so do people
    # who extend a context by hand: what they add counts.
    rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ModelError(f"config.json: rope_parameters is {rope!r}, expected an object; correct the config")
    kind = rope.get("rope_type", rope.get("type", "default"))
    special = rope.get("partial_rotary_factor", 1.0) != 1.0 or rope.keys() & {"mscale", "mscale_all_dim"}
    if kind not in ("default", "linear", "llama3", "yarn") or special:
        raise ModelError(
            f"config.json: the rotary embedding is {rope!r}, the CPU engine serves rope_type 'default', 'linear', "
            f"'llama3' and 'yarn' of whole heads, without mscale; {_REMEDY}"
        )
    theta = _positive({"rope_theta": fields.get("rope_theta"), **rope}, "rope_theta", default=10_000.0)
    if theta <= 1:
        raise ModelError(f"config.json: rope_theta is {theta}, expected a number above 1; correct the config")
    # Above the rotary embedding's own fields it wins, as in transformers.
    place = fields if "original_max_position_embeddings" in fields else rope
    original = _count(place, "original_max_position_embeddings", default=max_positions)
    return Rope(theta=theta, scaling=_scaling(kind, rope, original_positions=original))


def _scaling(
    kind: str, rope: Mapping[str, object], *, original_positions: int
) -> LinearScaling | Llama3Scaling | YarnScaling | None:
    if kind == "default":
        return None
    factor = _positive(rope, "factor")
    if kind == "linear":
        return LinearScaling(factor=factor)
    if kind == "llama3":
        low, high = _positive(rope, "low_freq_factor"), _positive(rope, "high_freq_factor")
        if low >= high:
            raise ModelError(
                f"config.json: low_freq_factor {low} is not below high_freq_factor {high}; correct the config"
            )
        return Llama3Scaling(
            factor=factor, low_freq_factor=low, high_freq_factor=high, original_positions=original_positions
        )
    return YarnScaling(
        factor=factor,
        beta_fast=_positive(rope, "beta_fast", default=32.0),
        beta_slow=_positive(rope, "beta_slow", default=1.0),
        truncate=_flag(rope, "truncate", default=True),
        original_positions=original_positions,
        attention_factor=_positive(
            rope, "attention_factor", default=0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        ),
    )


def _eos_token_ids(fields: dict[str, object], *, folder: Path) -> frozenset[int]:
    """End tokens of the model, plus those its generation_config.json adds."""
    generation = folder / "generation_config.json"
    sources = [fields, _read_json(generation)] if generation.exists() else [fields]
    found: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        found.update(
            token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int)
        )
    return frozenset(found)


def _read_json(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read: {error.strerror}; give the folder of a Hugging Face checkpoint"
        ) from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}; write the checkpoint again") from error
    if not isinstance(content, dict):
        raise ModelError(
            f"{path} holds {type(content).__name__}, expected an object; write the checkpoint again"
        )
    return content


def _count(fields: Mapping[str, object], name: str, *, default: int | None = None) -> int:
    value = fields.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(
            f"config.json: {name} is {value!r}, expected an integer of at least 1; correct the config"
        )
    return value


def _positive(fields: Mapping[str, object], name: str, *, default: float | None = None) -> float:
    value = fields.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelError(f"config.json: {name} is {value!r}, expected a number above 0; correct the config")
    return float(value)


def _flag(fields: Mapping[str, object], name: str, *, default: bool = False) -> bool:
    value = fields.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ModelError(f"config.json: {name} is {value!r}, expected true or false; correct the config")
    return value
