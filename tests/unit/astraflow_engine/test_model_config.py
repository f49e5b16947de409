"""Which checkpoints can be served: read from config.json, refused by field."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from astraflow_engine import errors, model_config
from astraflow_engine.rotary import Llama3Scaling, Rope, YarnScaling
from support.tiny_models import EOS, TinyShape, save_tiny_model


def rewrite(folder: Path, file: str = "config.json", /, **changes: object) -> None:
    """Change fields of a JSON file; None deletes one."""
    path = folder / file
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def test_the_sizes_come_from_the_checkpoint(folder: Path) -> None:
    config = model_config.load_model_config(folder)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 8)
    assert (config.rope, config.tied_embeddings, config.eos_token_ids) == (Rope(theta=10_000.0), True, {EOS})


def test_end_tokens_of_the_generation_config_count_too(folder: Path) -> None:
    rewrite(folder, "generation_config.json", eos_token_id=[5, 6])
    assert model_config.load_model_config(folder).eos_token_ids == {EOS, 5, 6}


FAMILIES = [
    ("llama", {}, "LlamaForCausalLM", []),
    ("llama", {"mlp_bias": True}, "LlamaForCausalLM", ["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"]),
    ("qwen2", {}, "Qwen2ForCausalLM", ["self_attn.k_proj", "self_attn.q_proj", "self_attn.v_proj"]),
    ("qwen3", {}, "Qwen3ForCausalLM", []),
]


@pytest.mark.parametrize(("model_type", "more", "architecture", "biased"), FAMILIES)
def test_a_family_says_what_a_layer_consists_of(
    tmp_path: Path, model_type: str, more: dict[str, object], architecture: str, biased: list[str]
) -> None:
    folder = save_tiny_model(tmp_path, shape=TinyShape(model_type=model_type, more=more))
    config = model_config.load_model_config(folder)
    assert (config.model_type, config.architecture) == (model_type, architecture)
    assert (sorted(config.biased), config.query_key_norm) == (biased, model_type == "qwen3")


def test_sizes_that_early_llama_configs_leave_out_follow_from_the_others(folder: Path) -> None:
    rewrite(folder, model_type="llama", head_dim=None, num_key_value_heads=None, hidden_size=64)
    config = model_config.load_model_config(folder)
    assert (config.num_kv_heads, config.head_dim) == (4, 16)


@pytest.mark.parametrize("name", ["rope_type", "type"])
def test_the_older_form_of_rope_is_read(folder: Path, name: str) -> None:
    rewrite(folder, rope_parameters=None, rope_theta=1_000_000.0)
    assert model_config.load_model_config(folder).rope == Rope(theta=1_000_000.0)
    scaling = {name: "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}
    rewrite(folder, rope_scaling=scaling, max_position_embeddings=4096)
    llama3 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=4096)
    assert model_config.load_model_config(folder).rope == Rope(theta=1_000_000.0, scaling=llama3)


def test_a_scaling_added_by_hand_wins_over_what_was_saved(folder: Path) -> None:
    added = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    rewrite(folder, rope_theta=500_000.0, rope_scaling=added, original_max_position_embeddings=64)
    rope = model_config.load_model_config(folder).rope
    assert isinstance(rope.scaling, YarnScaling)
    assert (rope.theta, rope.scaling.original_positions) == (500_000.0, 64)
    expected, _ = ROPE_INIT_FUNCTIONS["yarn"](AutoConfig.from_pretrained(folder))
    torch.testing.assert_close(rope.frequencies(8), expected, rtol=1e-6, atol=0)


def test_what_yarn_leaves_out_has_the_values_of_its_paper(folder: Path) -> None:
    rewrite(folder, rope_scaling={"type": "yarn", "factor": 4.0}, rope_parameters=None)
    scaling = model_config.load_model_config(folder).rope.scaling
    assert isinstance(scaling, YarnScaling)
    assert (scaling.beta_fast, scaling.beta_slow, scaling.original_positions) == (32.0, 1.0, 128)
    assert scaling.attention_factor == pytest.approx(1.1386, abs=1e-4)


def rope(kind: str, **fields: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, **fields}}


FOR_SGLANG = [
    ({"model_type": "gemma3_text"}, "model_type is 'gemma3_text', .* families llama, qwen2, qwen3"),
    ({"use_sliding_window": True}, "use_sliding_window is True"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has .*sliding_attention"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"quantization_config": {"bits": 4}}, "quantization_config is .* serves only None"),
    (rope("dynamic", factor=4.0), "rotary embedding is .*'dynamic'"),
    (rope("yarn", factor=4.0, mscale=1.0), "mscale"),
    (rope("default", partial_rotary_factor=0.5), "partial_rotary_factor': 0.5"),
]


@pytest.mark.parametrize(("changes", "complaint"), FOR_SGLANG)
def test_what_cannot_be_served_is_refused_and_sglang_is_named(
    folder: Path, changes: dict[str, object], complaint: str
) -> None:
    rewrite(folder, **changes)
    with pytest.raises(errors.ModelError, match=f"{complaint}.*let nodes serve .* --engine sglang"):
        model_config.load_model_config(folder)


BROKEN = [
    ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
    ({"head_dim": 7}, "head_dim 7 is odd"),
    (
        {"head_dim": None, "num_attention_heads": 5},
        "hidden_size 32 is not a multiple of num_attention_heads 5",
    ),
    ({"eos_token_id": 4_000}, r"eos_token_id \[4000\] is outside the vocabulary of 97"),
    ({"hidden_size": None}, "hidden_size is None"),
    ({"vocab_size": "97"}, "vocab_size is '97'"),
    ({"attention_bias": "no"}, "attention_bias is 'no', expected true or false"),
    ({"model_type": ["llama"]}, r"model_type is \['llama'\]"),
    ({"layer_types": "full"}, "layer_types has 'full'"),
    ({"layer_types": [{}]}, "layer_types has {}"),
    (rope("default", rope_theta=0.5), "rope_theta is 0.5, expected a number above 1"),
    ({"rope_parameters": [1]}, r"rope_parameters is \[1\], expected an object"),
    (rope("linear"), "factor is None, expected a number above 0"),
    (rope("llama3", factor=8, low_freq_factor=4, high_freq_factor=4), "low_freq_factor 4.0 is not below"),
]


@pytest.mark.parametrize(("changes", "complaint"), BROKEN)
def test_a_config_that_contradicts_itself_is_refused(
    folder: Path, changes: dict[str, object], complaint: str
) -> None:
    rewrite(folder, **changes)
    with pytest.raises(errors.ModelError, match=complaint):
        model_config.load_model_config(folder)


def test_broken_json_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(errors.ModelError, match="is not JSON"):
        model_config.load_model_config(folder)
