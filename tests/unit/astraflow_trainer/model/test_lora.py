"""Adapters: they alone are trained and published, and what is published is what peft and the engine compute."""

import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import save_file

from astraflow.recipe import LoraSettings, OptimizerSettings
from astraflow_engine.adapters import load_adapter
from astraflow_engine.model_config import load_model_config
from astraflow_trainer.model.lora import CONFIG_FILE, adapted, write_adapter_config
from astraflow_trainer.model.model import PolicyModel, build_causal_lm, load_causal_lm, save_causal_lm
from astraflow_trainer.model.optimizer import MasterOptimizer
from astraflow_trainer.publish.published import HeldPart
from support.tiny_training import TINY

LORA = LoraSettings(of="base", rank=4, alpha=8.0)
IDS = torch.tensor([[1, 5, 9, 2, 7, 3]])


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_causal_lm(build_causal_lm(TINY, seed=0), folder)
    return folder


def _policy(model_dir: Path, lora: LoraSettings = LORA, *, seed: int = 0) -> PolicyModel:
    return PolicyModel(adapted(load_causal_lm(model_dir), lora, seed=seed))


def _trained(model_dir: Path, *, steps: int = 3) -> PolicyModel:
    policy = _policy(model_dir)
    optimizer = MasterOptimizer(policy, settings=OptimizerSettings(learning_rate=0.05, warmup_steps=0))
    for _ in range(steps):
        (-policy.next_token_logprobs(IDS, last=1)[..., 3].sum()).backward()
        optimizer.step(gradient_norm=optimizer.gradient_norm())
    return policy


def _write(policy: PolicyModel, folder: Path) -> Path:
    """The folder of a version, as nodes hold it: the tensors that are published, and the configuration."""
    write_adapter_config(LORA, folder)
    held = HeldPart(policy)
    flat = torch.empty(held.num_elements, dtype=torch.bfloat16)
    held.copy_to(flat)
    model, at, tensors = held.shards(flat), 0, {}
    for spec in model.specs:
        count = len(model.shards[spec.name].elements)
        tensors[spec.name] = flat[at : at + count].reshape(spec.shape).clone()
        at += count
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_an_adapter_begins_as_the_model_itself_alike_wherever_it_is_made(model_dir: Path) -> None:
    plain, first, second = PolicyModel(load_causal_lm(model_dir)), _policy(model_dir), _policy(model_dir)
    other = _policy(model_dir, seed=1)
    with torch.no_grad():
        expected = plain.next_token_logprobs(IDS, last=2)
        assert torch.equal(first.next_token_logprobs(IDS, last=2), expected)
    tensors = [dict(policy.hf_parameters()) for policy in (first, second, other)]
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
    assert any(not torch.equal(tensors[0][name], tensors[2][name]) for name in tensors[0])


@pytest.mark.parametrize(("modules", "num_modules"), [("all-linear", 7), ("attention", 4)])
def test_only_its_own_parameters_are_published_under_the_names_of_peft(
    model_dir: Path, tmp_path: Path, modules: str, num_modules: int
) -> None:
    lora = LORA.model_copy(update={"target_modules": modules})
    policy = _policy(model_dir, lora)
    policy.causal_lm.save_pretrained(tmp_path / "peft")
    saved = peft.utils.load_peft_weights(str(tmp_path / "peft"), device="cpu")
    published = dict(policy.hf_parameters())
    assert {name: tensor.shape for name, tensor in published.items()} == {
        name: tensor.shape for name, tensor in saved.items()
    }
    assert len(published) == 2 * num_modules * TINY.num_hidden_layers
    written = json.loads(write_adapter_config(lora, tmp_path).read_text())
    theirs = json.loads((tmp_path / "peft" / CONFIG_FILE).read_text())
    assert sorted(theirs["target_modules"]) == written["target_modules"]
    assert all(
        theirs[key] == value for key, value in written.items() if key in ("r", "lora_alpha", "peft_type")
    )


def test_training_changes_the_adapter_and_nothing_of_the_model(model_dir: Path) -> None:
    policy, before = _trained(model_dir), dict(PolicyModel(load_causal_lm(model_dir)).named_parameters())
    frozen = {name: tensor for name, tensor in policy.named_parameters() if not tensor.requires_grad}
    assert len(frozen) == len(before)
    for name, tensor in frozen.items():
        plain = name.replace("base_model.model.", "").replace(".base_layer", "")
        assert torch.equal(tensor, before[plain])
    for name, tensor in policy.hf_parameters():
        assert torch.equal(tensor, tensor.to(torch.bfloat16).float()), name
        assert name.endswith("lora_A.weight") or tensor.any(), name


def test_what_is_published_answers_in_peft_as_it_does_in_the_trainer(model_dir: Path, tmp_path: Path) -> None:
    policy = _trained(model_dir)
    folder = _write(policy, tmp_path / "version")
    with torch.no_grad():
        expected = policy.next_token_logprobs(IDS, last=3)
        theirs = peft.PeftModel.from_pretrained(load_causal_lm(model_dir), str(folder)).float()
        found = torch.log_softmax(theirs(input_ids=IDS, use_cache=False).logits[:, -3:], -1)
        plain = PolicyModel(load_causal_lm(model_dir)).next_token_logprobs(IDS, last=3)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert (plain - expected).abs().max() > 0.1


def test_the_engine_takes_what_is_published(model_dir: Path, tmp_path: Path) -> None:
    folder = _write(_trained(model_dir), tmp_path / "version")
    adapter = load_adapter(folder, config=load_model_config(model_dir))
    assert set(adapter.layers[0]) == {"qkv", "output", "gate_up", "down"}
