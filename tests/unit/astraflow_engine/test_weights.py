"""Checkpoint tensors: complete, finite, of the right shape and rounded to bf16, or refused by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from astraflow_engine.errors import ModelError
from astraflow_engine.model_config import load_model_config
from astraflow_engine.weights import Weights, expected_shapes, load_weights
from support.tiny_models import TinyShape, matrix_of, save_tiny_model

DOWN = "model.layers.1.mlp.down_proj.weight"


def load(folder: Path) -> Weights:
    return load_weights(folder, config=load_model_config(folder))


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace or (None) drop tensors of the checkpoint."""
    held = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        held.pop(name, None)
        if tensor is not None:
            held[name] = tensor
    save_file(held, folder / "model.safetensors")


BIASES = {"attention_bias": True, "mlp_bias": True}


@pytest.mark.parametrize(
    "shape",
    [
        TinyShape(tied=False),
        TinyShape(more={"attention_bias": True}),
        TinyShape(model_type="qwen2"),
        TinyShape(model_type="llama", tied=False),
        TinyShape(model_type="llama", more=BIASES),
    ],
    ids=["qwen3", "qwen3-biased", "qwen2", "llama", "llama-biased"],
)
def test_every_expected_tensor_is_in_a_saved_checkpoint(tmp_path: Path, shape: TinyShape) -> None:
    folder = save_tiny_model(tmp_path / "model", shape=shape)
    held = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    assert held == expected_shapes(load_model_config(folder))


def test_numbers_are_those_of_the_file_in_fp32(folder: Path) -> None:
    weights = load(folder)
    saved = load_file(folder / "model.safetensors")
    assert weights.embedding_VD.dtype == torch.float32
    assert torch.equal(matrix_of(weights.layers[1].down, num_inputs=48), saved[DOWN].float())
    assert torch.equal(matrix_of(weights.head, num_inputs=32), saved["model.embed_tokens.weight"].float())


def test_fp32_files_are_rounded_to_bf16(folder: Path) -> None:
    exact = torch.full((32, 48), 1.0 + 2**-12)
    change(folder, **{DOWN: exact})
    assert torch.equal(matrix_of(load(folder).layers[1].down, num_inputs=48), torch.ones(32, 48))


def test_a_sharded_checkpoint_loads_like_a_single_file(tmp_path: Path, folder: Path) -> None:
    sharded = save_tiny_model(tmp_path / "sharded", max_shard_size="20KB")
    assert not (sharded / "model.safetensors").exists()
    assert torch.equal(*(matrix_of(load(one).layers[1].qkv, num_inputs=32) for one in (sharded, folder)))


def test_loaded_tensors_do_not_change_with_the_file(folder: Path) -> None:
    weights = load(folder)
    before = matrix_of(weights.layers[0].gate_up, num_inputs=32)
    (folder / "model.safetensors").write_bytes(b"\0" * (folder / "model.safetensors").stat().st_size)
    assert torch.equal(matrix_of(weights.layers[0].gate_up, num_inputs=32), before)


WRONG_TENSORS = [
    (None, rf"lacks 1 of 24 tensors, first \['{DOWN}'\]"),
    (torch.zeros(48, 32), r"has shape \(48, 32\), the served model needs \(32, 48\)"),
    (torch.full((32, 48), float("nan")), "holds NaN or infinity"),
    (torch.zeros(32, 48, dtype=torch.int64), "has type torch.int64"),
]


@pytest.mark.parametrize(("tensor", "complaint"), WRONG_TENSORS, ids=["missing", "shape", "nan", "integer"])
def test_a_wrong_tensor_is_refused_by_name(folder: Path, tensor: torch.Tensor | None, complaint: str) -> None:
    change(folder, **{DOWN: tensor})
    with pytest.raises(ModelError, match=complaint) as refusal:
        load(folder)
    assert DOWN in refusal.value.message


def test_frequencies_that_early_llama_checkpoints_carry_are_passed_over(folder: Path) -> None:
    change(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert load(folder).num_bytes


def test_a_bias_that_the_model_lacks_is_refused(folder: Path) -> None:
    change(folder, **{"model.layers.0.self_attn.q_proj.bias": torch.ones(32)})
    with pytest.raises(ModelError, match=r"q_proj.bias' is not part of the model"):
        load(folder)


def test_an_unknown_tensor_is_refused(folder: Path) -> None:
    change(folder, **{"model.layers.2.mlp.down_proj.weight": torch.zeros(32, 48)})
    with pytest.raises(ModelError, match=r"model.layers.2.mlp.down_proj.weight' is not part of the model"):
        load(folder)


def test_a_truncated_file_is_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model.safetensors cannot be read"):
        load(folder)


@pytest.mark.parametrize("index", [{"weight_map": {DOWN: "../other.safetensors"}}, {"weights": {}}, []])
def test_an_index_that_leads_nowhere_is_refused(folder: Path, index: object) -> None:
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"points outside its folder|has no usable weight_map"):
        load(folder)
