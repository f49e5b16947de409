"""The architecture of the served model, read from a Hugging Face `config.json`.

Owns the decision which checkpoints this engine can serve exactly: dense Qwen3 with full attention and plain
rotary embeddings. Anything else is refused with the field at fault instead of being served approximately.
Called at start-up; a weight update keeps the architecture and only brings tensors.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from astraflow_engine.errors import ModelError

_REQUIRED: dict[str, object] = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of a dense Qwen3 model. Counts unless the name says otherwise."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    tied_embeddings: bool
    eos_token_ids: frozenset[int]


def load_model_config(folder: Path) -> ModelConfig:
    """Read and verify `folder/config.json`. Raises ModelError when it is missing or cannot be served."""
    fields = _read_json(folder / "config.json")
    for name, wanted in _REQUIRED.items():
        if fields.get(name, wanted) != wanted:
            raise ModelError(
                f"{folder}/config.json: {name} is {fields[name]!r}, this engine serves only {wanted!r}; "
                "use SGLang for this model"
            )
    config = ModelConfig(
        vocab_size=_count(fields, "vocab_size"),
        hidden_size=_count(fields, "hidden_size"),
        num_layers=_count(fields, "num_hidden_layers"),
        num_heads=_count(fields, "num_attention_heads"),
        num_kv_heads=_count(fields, "num_key_value_heads"),
        head_dim=_count(fields, "head_dim"),
        intermediate_size=_count(fields, "intermediate_size"),
        rms_norm_eps=_positive(fields, "rms_norm_eps", default=1e-6),
        rope_theta=_rope_theta(fields),
        max_positions=_count(fields, "max_position_embeddings"),
        tied_embeddings=bool(fields.get("tie_word_embeddings", False)),
        eos_token_ids=_eos_token_ids(fields, folder=folder),
    )
    _verify_shape(config)
    return config


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


def _rope_theta(fields: dict[str, object]) -> float:
    # transformers 5 writes `rope_parameters`; older checkpoints have `rope_theta` and `rope_scaling`.
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ModelError(f"config.json: rope_parameters is {rope!r}, expected an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ModelError(f"config.json: rope_type is {kind!r}, this engine serves only 'default'; use SGLang")
    return _positive({"rope_theta": fields.get("rope_theta"), **rope}, "rope_theta", default=10_000.0)


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


def _count(fields: dict[str, object], name: str) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {name} is {value!r}, expected an integer of at least 1")
    return value


def _positive(fields: dict[str, object], name: str, *, default: float) -> float:
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelError(f"config.json: {name} is {value!r}, expected a number above 0")
    return float(value)
