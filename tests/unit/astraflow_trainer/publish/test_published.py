"""Published bytes are the model's weights, bit for bit, and stay as they were taken."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh

from astraflow.recipe import OptimizerSettings
from astraflow_trainer.model.model import PolicyModel, load_causal_lm, local_part
from astraflow_trainer.model.optimizer import MasterOptimizer
from astraflow_trainer.model.sharding import Placement
from astraflow_trainer.publish.loading import load_policy
from astraflow_trainer.publish.published import HeldPart, WeightCopies, same_shards
from astraflow_trainer.step.step import Outcome, StepSettings, train_step
from astraflow_weights.codec.shards import ShardedModel
from support.tiny_training import make_rows


def _taken(policy: PolicyModel) -> ShardedModel:
    return WeightCopies(policy).take().open()


def test_bits_are_the_bf16_patterns_of_the_masters(policy: PolicyModel) -> None:
    optimizer = MasterOptimizer(policy, settings=OptimizerSettings())
    taken = _taken(policy)
    assert [spec.name for spec in taken.specs] == sorted(name for name, _ in policy.hf_parameters())
    for spec, shard in taken.held():
        assert (shard.start, shard.elements.dtype) == (0, np.uint16)
        assert spec.shape == tuple(dict(policy.hf_parameters())[spec.name].shape)
        widened = (shard.elements.astype(np.uint32) << 16).view(np.float32)
        master = local_part(optimizer.masters[spec.name]).detach()
        assert np.array_equal(widened, master.to(torch.bfloat16).float().numpy().reshape(-1)), spec.name


def test_a_ranks_part_of_a_whole_model_is_what_it_holds_of_its_own(policy: PolicyModel) -> None:
    taken = _taken(policy)
    whole = np.arange(2**16, dtype=np.uint16)
    other = {spec.name: whole[: spec.num_elements].reshape(spec.shape) for spec in taken.specs}
    part = same_shards(other, like=HeldPart(policy))
    assert part.specs == taken.specs
    for spec, shard in part.held():
        assert np.array_equal(shard.elements, other[spec.name].reshape(-1)[shard.start : shard.stop])
        assert not np.shares_memory(shard.elements, other[spec.name])


def test_a_released_copy_is_the_memory_of_the_next_one(policy: PolicyModel) -> None:
    """Copies that are still being published are left alone; none is made anew when one is free."""
    copies = WeightCopies(policy)
    first, second = copies.take(), copies.take()
    addresses = {_address(first.open()), _address(second.open())}
    assert len(addresses) == 2
    kept = second.open().shards["model.norm.weight"].elements.copy()
    for _ in range(3):
        with torch.no_grad():
            local_part(dict(policy.hf_parameters())["model.norm.weight"]).add_(1.0)
        first.published(b"")
        first = copies.take()
        assert _address(first.open()) in addresses
    assert np.array_equal(second.open().shards["model.norm.weight"].elements, kept)
    assert not np.array_equal(first.open().shards["model.norm.weight"].elements, kept)


def test_stacked_experts_are_published_as_the_tensors_of_their_checkpoint(tmp_path: Path) -> None:
    policy = PolicyModel(_mixture("qwen3_moe"))
    saved = tmp_path / "model"
    policy.causal_lm.bfloat16().save_pretrained(saved)
    taken = _taken(policy)
    published = {spec.name: shard.elements.reshape(spec.shape) for spec, shard in taken.held()}
    expected = load_file(saved / "model.safetensors")
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in expected
    assert published.keys() == expected.keys()
    for name, tensor in expected.items():
        assert np.array_equal(published[name], tensor.view(torch.uint16).numpy()), name


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "muon"])
def test_a_mixture_of_experts_is_loaded_trained_and_published_as_transformers_would_save_it(
    mesh: DeviceMesh, tmp_path: Path, kind: str
) -> None:
    torch.manual_seed(0)
    _mixture("qwen3_moe").save_pretrained(tmp_path)
    policy = load_policy(tmp_path, mesh=mesh, placement=Placement()).train()
    settings = {"kind": kind, "learning_rate": 1e-2, "warmup_steps": 0}
    optimizer = MasterOptimizer(policy, settings=OptimizerSettings.model_validate(settings))
    before = {spec.name: shard.elements for spec, shard in _taken(policy).held()}
    metrics = train_step(policy, optimizer=optimizer, rows=make_rows(), settings=StepSettings())
    assert metrics.outcome is Outcome.COMMITTED
    twin = load_causal_lm(tmp_path)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            parameter.copy_(local_part(optimizer.masters[name]))
    twin.bfloat16().save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    published = {spec.name: shard.elements for spec, shard in _taken(policy).held()}
    assert published.keys() == saved.keys()
    for name, bits in published.items():
        assert np.array_equal(bits, saved[name].view(torch.uint16).numpy().reshape(-1)), name
    moved = {name for name in published if not np.array_equal(published[name], before[name])}
    assert {f"model.layers.0.mlp.{part}.weight" for part in ("gate", "experts.0.up_proj")} <= moved


def test_stacked_experts_without_a_map_are_refused() -> None:
    with pytest.raises(ValueError, match=r"mlp.experts.gate_up_proj' stacks experts, and it is not known"):
        WeightCopies(PolicyModel(_mixture("mixtral")))


def _mixture(kind: str) -> transformers.PreTrainedModel:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_experts_per_tok": 2}
    experts = (
        {"moe_intermediate_size": 8, "num_experts": 4} if kind == "qwen3_moe" else {"num_local_experts": 4}
    )
    config = transformers.AutoConfig.for_model(kind, **sizes, **heads, **experts)
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config)
    return model


def _address(model: ShardedModel) -> int:
    return int(model.shards["model.embed_tokens.weight"].elements.__array_interface__["data"][0])


def test_published_shards_go_back_to_the_parameters_that_they_came_from(policy: PolicyModel) -> None:
    held = HeldPart(policy)
    flat = torch.arange(held.num_elements, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    weights = held.by_parameter(held.shards(flat))
    again = torch.empty_like(flat)
    with torch.no_grad():
        for name, parameter in held.parameters.items():
            local_part(parameter).view(-1).copy_(weights[name].float())
    held.copy_to(again)
    finite = ~flat.float().isnan()
    assert int(finite.sum()) > held.num_elements / 2
    assert torch.equal(again.view(torch.int16)[finite], flat.view(torch.int16)[finite])
