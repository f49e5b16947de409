"""A learner on a GPU learns, publishes and resumes as one on the CPU does. Needs a GPU: `pytest tests/gpu`."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from astraflow.recipe import file
from astraflow_kit.plugins import RecipeSource
from astraflow_trainer.learner import PolicyLearner
from astraflow_trainer.model.model import build_causal_lm, local_part, save_causal_lm
from astraflow_trainer.model.sharding import Placement
from astraflow_trainer.publish.change_detection import changed
from astraflow_trainer.publish.change_kernels import is_available
from astraflow_trainer.ranks.device import DeviceChoice, training_device
from astraflow_trainer.ranks.group import join_rank_group
from astraflow_trainer.settings import RankSettings
from astraflow_trainer.step.plugins import StepPlugins
from astraflow_weights.codec.tiles.delta import scan
from support import scripted_dataflow, tiny_training

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]


@pytest.fixture(autouse=True)
def _no_process_group_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_causal_lm(build_causal_lm(tiny_training.TINY, seed=0), folder)
    return folder


def _learner(
    model_dir: Path,
    *overrides: str,
    device: DeviceChoice = "cuda",
    placement: Placement | None = None,
) -> PolicyLearner:
    if dist.is_initialized():
        dist.destroy_process_group()
    overrides = ("trainer.optimizer.warmup_steps=0", *overrides)
    policy = file.parse_recipe(scripted_dataflow.RECIPE, overrides=overrides).recipe.policy("solver")
    return PolicyLearner(
        policy,
        plugins=StepPlugins.made(policy.trainer.algorithm, source=RecipeSource(), roles=policy.advantages),
        model_dir=model_dir,
        checkpoint_dir=model_dir.parent / "checkpoints",
        group=join_rank_group(RankSettings(), timeout_s=60.0, device=training_device(device, local_rank=0)),
        placement=placement,
    )


def _bits(learner: PolicyLearner) -> np.ndarray:
    shards = learner.published_bytes().open().shards
    return np.concatenate([shards[name].elements for name in sorted(shards)])


def test_a_step_equals_the_cpu_s(model_dir: Path) -> None:
    rows = tiny_training.make_rows()
    here = _learner(model_dir, device="cpu").train(rows)
    there = _learner(model_dir, "trainer.compute=fp32").train(rows)
    rounded = _learner(model_dir, "trainer.compute=bf16").train(rows)
    assert here.loss is not None
    assert there.loss is not None
    assert rounded.loss is not None
    assert there.loss.loss == pytest.approx(here.loss.loss, abs=1e-4)
    assert there.gradient_norm == pytest.approx(here.gradient_norm, rel=1e-4)
    assert rounded.gradient_norm == pytest.approx(here.gradient_norm, rel=0.1)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("offload", [False, True])
def test_it_resumes_with_the_same_published_bits(model_dir: Path, compute: str, offload: bool) -> None:
    first = _learner(model_dir, f"trainer.compute={compute}", placement=Placement(offload=offload))
    initial = _bits(first)
    first.train(tiny_training.make_rows())
    first.stage(step=1, version=1)()
    resumed = _learner(model_dir, f"trainer.compute={compute}", placement=Placement(offload=offload))
    assert resumed.restore() is not None
    assert np.array_equal(_bits(first), _bits(resumed))
    assert not np.array_equal(initial, _bits(first))


@pytest.mark.parametrize("placement", [Placement(), Placement(compiled=True)], ids=["eager", "compiled"])
def test_attention_to_pieces_is_attention_under_a_mask(model_dir: Path, placement: Placement) -> None:
    rows = tiny_training.make_rows()
    masked = _learner(model_dir, "trainer.compute=bf16", placement=Placement(attention="mask")).train(rows)
    pieced = _learner(model_dir, "trainer.compute=bf16", placement=placement).train(rows)
    assert masked.loss is not None
    assert pieced.loss is not None
    assert pieced.loss.loss == pytest.approx(masked.loss.loss, abs=1e-2)
    assert pieced.gradient_norm == pytest.approx(masked.gradient_norm, rel=0.1)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("count", [4, 4096, 100_004])
def test_the_kernels_find_the_changes_that_the_host_finds(count: int, share: float) -> None:
    generator = np.random.default_rng(count)
    old = generator.integers(0, 2**16, count, dtype=np.uint16)
    new = np.where(generator.random(count) < share, generator.integers(0, 2**16, count, dtype=np.uint16), old)
    places = [torch.from_numpy(bits.view(np.int16)).cuda() for bits in (new, old)]
    assert is_available(places[0].device), "torch for CUDA brings triton"
    positions, steps = changed(*places)
    expected_positions, expected_steps = scan(old, new)
    assert np.array_equal(positions.cpu().numpy().view(np.uint32), expected_positions)
    assert np.array_equal(steps.cpu().numpy().view(np.uint16), expected_steps)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_what_changed_since_the_last_version_is_what_a_copy_says(model_dir: Path, compute: str) -> None:
    learner = _learner(model_dir, f"trainer.compute={compute}")
    before = {name: shard.elements.copy() for name, shard in learner.published_bytes().open().shards.items()}
    learner.train(tiny_training.make_rows())
    model = learner.published_bytes().open()
    assert model.changes is not None
    copied = {name: _host_bits(parameter) for name, parameter in learner._policy.hf_parameters()}
    assert any(not np.array_equal(before[name], bits) for name, bits in copied.items())
    for name, bits in copied.items():
        assert np.array_equal(model.shards[name].elements, bits), name


def _host_bits(parameter: torch.Tensor) -> np.ndarray:
    flat = local_part(parameter).detach().to(torch.bfloat16).flatten().view(torch.int16)
    return flat.cpu().numpy().view(np.uint16)
