"""What the trainer publishes is, bit for bit, what the engine computes with, by snapshot and by delta."""

from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from astraflow.recipe import OptimizerSettings
from astraflow_engine.linear import Linear
from astraflow_engine.model_config import load_model_config
from astraflow_engine.weights import load_weights
from astraflow_trainer.model.model import PolicyModel, load_causal_lm
from astraflow_trainer.model.optimizer import MasterOptimizer
from astraflow_trainer.publish.published import WeightCopies
from astraflow_trainer.warm_start.starting_model import asset_files
from astraflow_weights.codec.tensors import Array
from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.publish.version_writer import VersionWriter
from astraflow_weights.store import ObjectStore, open_store
from astraflow_weights.tools.export import export_version
from astraflow_weights.versions.log import VersionLog
from support.engine_process import running_engine
from support.published_models import ModelPublisher
from support.tiny_models import (
    load_reference,
    matrix_of,
    reference_greedy,
    reference_logprobs,
    save_tiny_model,
    widened,
)

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


class Trained:
    """A trainer's model, published after the start and after one optimizer step."""

    def __init__(self, folder: Path, store: ObjectStore) -> None:
        save_tiny_model(folder)
        self.policy = PolicyModel(load_causal_lm(folder))
        self.optimizer = MasterOptimizer(self.policy, settings=OptimizerSettings(learning_rate=1e-3))
        writer = VersionWriter.open(store, run_id="r", policy_id="p", epoch=1)
        self._publisher = ModelPublisher(writer, assets=asset_files(folder))

    def step(self) -> None:
        """Take an optimizer step along a random gradient."""
        generator = torch.Generator().manual_seed(7)
        for _, parameter in self.policy.hf_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        self.optimizer.step(gradient_norm=self.optimizer.gradient_norm())

    def publish(self, step: int) -> dict[str, Array]:
        """Publish and return the published bytes."""
        taken = WeightCopies(self.policy).take().open()
        model = {spec.name: shard.elements.reshape(spec.shape) for spec, shard in taken.held()}
        self._publisher.publish(model, step=step)
        return model


def test_the_engine_computes_with_the_published_bytes_by_snapshot_and_by_delta(tmp_path: Path) -> None:
    store = open_store((tmp_path / "store").as_uri())
    trained = Trained(tmp_path / "model", store)
    mirror, log = Mirror(tmp_path / "mirror"), VersionLog(store, run_id="r", policy_id="p")

    first = trained.publish(0)
    log.refresh()
    by_snapshot = mirror.advance(store, log, target=0)
    assert by_snapshot.counts.snapshots_fetched == 1
    with running_engine(by_snapshot.directory, "--weight-version", "0", folder=tmp_path) as engine:
        assert_same_bits(by_snapshot.directory, first)
        assert_samples_like(engine.url, by_snapshot.directory, version="0")
        trained.step()
        second = trained.publish(1)
        log.refresh()
        by_delta = mirror.advance(store, log, target=1)
        assert (by_delta.counts.snapshots_fetched, by_delta.counts.deltas_fetched) == (0, 1)
        swap(engine.url, by_delta.directory, version="1")
        assert_same_bits(by_delta.directory, second)
        assert_samples_like(engine.url, by_delta.directory, version="1")
    assert any((first[name] != second[name]).any() for name in first)


@pytest.mark.parametrize("max_shard_bytes", [5 * 10**9, 20_000])
def test_transformers_continues_an_exported_version_as_the_engine_does(
    tmp_path: Path, max_shard_bytes: int
) -> None:
    store = open_store((tmp_path / "store").as_uri())
    trained = Trained(tmp_path / "model", store)
    trained.publish(0)
    trained.step()
    trained.publish(1)
    log = VersionLog(store, run_id="r", policy_id="p")
    log.refresh()
    folder = tmp_path / "exported"
    export_version(store, log, version=1, to=folder, max_shard_bytes=max_shard_bytes)
    assert (folder / "model.safetensors").exists() == (max_shard_bytes > 20_000)
    with running_engine(folder, "--weight-version", "1", folder=tmp_path) as engine:
        assert greedy(engine.url) == reference_greedy(load_reference(folder), PROMPT, num_tokens=8)


def greedy(url: str) -> list[int]:
    """Eight tokens of the running engine."""
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    answer = httpx.post(
        f"{url}/generate", json={"input_ids": PROMPT, "sampling_params": sampling}, timeout=30
    )
    ids: list[int] = answer.json()["output_ids"]
    return ids


def swap(url: str, directory: Path, *, version: str) -> None:
    """Load a version into the running engine."""
    body = {"model_path": str(directory), "weight_version": version, "flush_cache": True}
    answer = httpx.post(f"{url}/update_weights_from_disk", json=body, timeout=30)
    assert answer.json()["success"], answer.text


def assert_samples_like(url: str, directory: Path, *, version: str) -> None:
    """The running engine's log-probs are those of the reference model with these weights."""
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    meta = httpx.post(f"{url}/generate", json=body, timeout=30).json()["meta_info"]
    assert meta["weight_version"] == version
    logprobs, token_ids = zip(*((entry[0], entry[1]) for entry in meta["output_token_logprobs"]), strict=True)
    expected = reference_logprobs(load_reference(directory), PROMPT, list(token_ids))
    np.testing.assert_allclose(logprobs, expected, atol=1e-4)


LAYER = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
    "attention_norm_D": ("input_layernorm",),
    "mlp_norm_D": ("post_attention_layernorm",),
}
"""The engine's arrangement of a decoder layer: some matrices are one."""


def assert_same_bits(directory: Path, published: dict[str, Array]) -> None:
    """What the engine loads from the folder is what was published, put in the engine's own arrangement."""
    loaded = load_weights(directory, config=load_model_config(directory))
    floats = {name: widened(bits) for name, bits in published.items()}
    assert torch.equal(loaded.embedding_VD, floats["model.embed_tokens.weight"])
    assert torch.equal(loaded.norm_D, floats["model.norm.weight"])
    for index, layer in enumerate(loaded.layers):
        for name, parts in LAYER.items():
            expected = torch.cat([floats[f"model.layers.{index}.{part}.weight"] for part in parts])
            found = getattr(layer, name)
            assert torch.equal(
                matrix_of(found, num_inputs=expected.shape[1]) if isinstance(found, Linear) else found,
                expected,
            ), name
