"""Every kind of model that trains: loaded from its checkpoint, trained a step, published, and a node's mirror has the
bytes that transformers would have saved; of an adapter, its own stream and nothing of the frozen model.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from astraflow.recipe import LoraSettings, OptimizerSettings
from astraflow_trainer.model.lora import adapted
from astraflow_trainer.model.model import PolicyModel, load_causal_lm
from astraflow_trainer.model.optimizer import MasterOptimizer
from astraflow_trainer.publish.published import WeightCopies
from astraflow_trainer.step.step import Outcome, StepSettings, train_step
from astraflow_weights.codec.tensors import Array
from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.publish.version_writer import VersionWriter
from astraflow_weights.store import open_store
from astraflow_weights.versions.log import VersionLog
from support.published_models import ModelPublisher
from support.tiny_models import TinyShape, save_tiny_model
from support.tiny_training import make_rows

pytestmark = pytest.mark.integration

MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
KINDS = {
    "llama": TinyShape(model_type="llama", tied=False),
    "qwen2": TinyShape(model_type="qwen2"),
    "qwen3": TinyShape(model_type="qwen3", tied=False),
    "qwen3_moe": TinyShape(model_type="qwen3_moe", tied=False, more=MIXTURE),
    "qwen3_moe, every other layer": TinyShape(
        model_type="qwen3_moe", num_layers=4, more=MIXTURE | {"decoder_sparse_step": 2}
    ),
    "qwen2_moe": TinyShape(model_type="qwen2_moe", more=MIXTURE | {"shared_expert_intermediate_size": 24}),
}


class Trained:
    """A policy, versions of it in a store, and a node's mirror of them."""

    def __init__(self, policy: PolicyModel, folder: Path) -> None:
        self.policy = policy.train()
        self._optimizer = MasterOptimizer(
            self.policy, settings=OptimizerSettings(learning_rate=1e-2, warmup_steps=0)
        )
        self._store = open_store((folder / "store").as_uri())
        self._publisher = ModelPublisher(VersionWriter.open(self._store, run_id="r", policy_id="p", epoch=1))
        self._mirror = Mirror(folder / "mirror")

    def step(self) -> None:
        metrics = train_step(
            self.policy, optimizer=self._optimizer, rows=make_rows(), settings=StepSettings()
        )
        assert metrics.outcome is Outcome.COMMITTED

    def mirrored(self, version: int) -> tuple[Path, dict[str, Array]]:
        """Publish the version; the mirror's folder and what it holds of it."""
        taken = WeightCopies(self.policy).take().open()
        model = {spec.name: shard.elements.reshape(spec.shape) for spec, shard in taken.held()}
        self._publisher.publish(model, step=version)
        log = VersionLog(self._store, run_id="r", policy_id="p")
        log.refresh()
        advanced = self._mirror.advance(self._store, log, target=version)
        assert advanced.counts.snapshots_fetched == (version == 0), "the second version comes as a delta"
        return advanced.directory, self._mirror.load()


@pytest.mark.parametrize("kind", KINDS)
def test_a_node_has_the_bytes_that_transformers_would_save(kind: str, tmp_path: Path) -> None:
    checkpoint = save_tiny_model(tmp_path / "model", shape=KINDS[kind])
    trained = Trained(PolicyModel(load_causal_lm(checkpoint)), tmp_path)
    _, first = trained.mirrored(0)
    assert_same_bits(first, checkpoint)
    trained.step()
    _, second = trained.mirrored(1)
    saved = tmp_path / "saved"
    trained.policy.causal_lm.to(torch.bfloat16).save_pretrained(saved)
    assert_same_bits(second, saved)
    moved = {name for name in first if not np.array_equal(first[name], second[name])}
    experts = {name for name in first if ".experts." in name}
    assert bool(experts & moved) == ("moe" in kind)
    assert {name for name in first if "self_attn.q_proj.weight" in name} <= moved


def assert_same_bits(held: dict[str, Array], saved: Path) -> None:
    expected = load_file(saved / "model.safetensors")
    assert held.keys() == expected.keys()
    for name, tensor in expected.items():
        assert np.array_equal(held[name], tensor.view(torch.uint16).numpy()), name


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe"])
def test_a_node_gets_of_an_adapter_its_own_small_stream(kind: str, tmp_path: Path) -> None:
    checkpoint = save_tiny_model(tmp_path / "model", shape=KINDS[kind])
    lora = LoraSettings(of="base", rank=1, alpha=2, target_modules="attention")
    trained = Trained(PolicyModel(adapted(load_causal_lm(checkpoint), lora, seed=0)), tmp_path)
    _, first = trained.mirrored(0)
    trained.step()
    _, second = trained.mirrored(1)
    assert {name.rsplit(".", 2)[-2] for name in second} == {"lora_A", "lora_B"}
    whole = sum(tensor.numel() for tensor in load_file(checkpoint / "model.safetensors").values())
    assert sum(array.size for array in second.values()) < 0.06 * whole
    assert any(not np.array_equal(first[name], second[name]) for name in first)
    own = dict(trained.policy.hf_parameters())
    assert second.keys() == own.keys()
    for name, bits in second.items():
        rounded = own[name].detach().to(torch.bfloat16).view(torch.uint16).numpy()
        assert np.array_equal(bits, rounded), name
