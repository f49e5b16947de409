"""First weights are read by each rank for itself, to the bit, and what does not fit is refused."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from astraflow.errors import InvalidArgumentError
from astraflow.recipe import TrainerSettings
from astraflow_trainer.model.model import (
    PolicyModel,
    build_causal_lm,
    empty_causal_lm,
    load_causal_lm,
    local_part,
    save_causal_lm,
)
from astraflow_trainer.model.sharding import Placement, shard
from astraflow_trainer.planning.memory_plan import RankLayout, memory_plan
from astraflow_trainer.publish.loading import load_policy
from astraflow_trainer.publish.published import HeldPart, WeightCopies
from astraflow_trainer.ranks.mesh import rank_mesh, replica_of
from support.tiny_training import TINY

NUM_RANKS = 16
LLAMA_70B = {
    "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 28672, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_8B = LLAMA_70B | {
    "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288,
    "vocab_size": 151936,
}  # fmt: skip


@pytest.fixture
def mesh_of() -> Iterator[Callable[[int, int], DeviceMesh]]:
    """The mesh of one of several ranks, of which the others do not exist: nothing is sent to them."""

    def mesh(rank: int, num_ranks: int) -> DeviceMesh:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
        # FSDP keeps what it knows of a mesh for others of the same shape and names.
        return init_device_mesh("cpu", (num_ranks,), mesh_dim_names=(f"of_rank_{rank}",))

    yield mesh
    if dist.is_initialized():
        dist.destroy_process_group()


def _shape(kind: str) -> PolicyModel:
    shape = replace(TINY, vocab_size=33, num_hidden_layers=2, tie_word_embeddings=kind == "tied")
    return PolicyModel(build_causal_lm(shape, seed=3))


@pytest.mark.parametrize("kind", ["tied", "apart"])
@pytest.mark.parametrize("in_files", [1, 3])
def test_ranks_read_their_own_rows_of_the_model(
    tmp_path: Path, mesh_of: Callable[[int, int], DeviceMesh], kind: str, in_files: int
) -> None:
    save_causal_lm(_shape(kind).causal_lm, tmp_path)
    if in_files > 1:
        _split(tmp_path, in_files)
    whole = PolicyModel(load_causal_lm(tmp_path))
    buffers = dict(whole.named_buffers())
    rows: dict[str, list[torch.Tensor]] = {}
    for rank in range(3):
        policy = load_policy(tmp_path, mesh=mesh_of(rank, 3), placement=Placement())
        for name, parameter in policy.hf_parameters():
            rows.setdefault(name, []).append(local_part(parameter).detach().clone())
        assert all(torch.equal(buffer, buffers[name]) for name, buffer in policy.named_buffers())
        assert dict(policy.named_buffers()).keys() == buffers.keys()
    expected = dict(whole.hf_parameters())
    assert rows.keys() == expected.keys()
    for name, parts in rows.items():
        assert torch.equal(torch.cat(parts), expected[name]), name


def _split(folder: Path, num_files: int) -> None:
    """Spread the tensors over files with an index, as large models are."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"part-{number % num_files}.safetensors" for number, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name, at in places.items() if at == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def test_a_frozen_model_is_kept_as_it_is_computed(
    tmp_path: Path, mesh_of: Callable[[int, int], DeviceMesh]
) -> None:
    save_causal_lm(_shape("tied").causal_lm, tmp_path)
    policy = load_policy(tmp_path, mesh=mesh_of(0, 1), placement=Placement(compute="bf16"), frozen=True)
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in policy.parameters())


def test_tensors_of_other_names_are_loaded_by_transformers(
    tmp_path: Path, mesh_of: Callable[[int, int], DeviceMesh]
) -> None:
    save_causal_lm(_shape("tied").causal_lm, tmp_path)
    file = tmp_path / "model.safetensors"
    old = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    save_file(old, file, metadata={"format": "pt"})
    found = load_policy(tmp_path, mesh=mesh_of(0, 1), placement=Placement())
    expected = dict(_shape("tied").hf_parameters())
    for name, parameter in found.hf_parameters():
        assert torch.equal(local_part(parameter), expected[name].bfloat16().float()), name


def test_a_tensor_of_another_shape_is_refused(
    tmp_path: Path, mesh_of: Callable[[int, int], DeviceMesh]
) -> None:
    save_causal_lm(_shape("tied").causal_lm, tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"model.norm.weight": torch.ones(8)}, file)
    with pytest.raises(
        InvalidArgumentError, match=r"model.norm.weight as \(8,\), the model of its config.json as \(16,\)"
    ):
        load_policy(tmp_path, mesh=mesh_of(0, 1), placement=Placement())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "fields", "num_parameters"),
    [("qwen3", QWEN3_8B, 8_190_735_360), ("llama", LLAMA_70B, 70_553_706_496)],
)
def test_sixteen_ranks_hold_every_element_of_a_large_model_once(
    tmp_path: Path,
    mesh_of: Callable[[int, int], DeviceMesh],
    model_type: str,
    fields: dict[str, int],
    num_parameters: int,
) -> None:
    rope = {"rope_type": "default", "rope_theta": 5e5}
    transformers.AutoConfig.for_model(model_type, **fields, rope_parameters=rope).save_pretrained(tmp_path)
    ends: dict[str, int] = {}
    for rank in (0, 1, NUM_RANKS - 1):
        policy = PolicyModel(empty_causal_lm(tmp_path))
        shard(policy, mesh=mesh_of(rank, NUM_RANKS), placement=Placement(compute="bf16"))
        held = HeldPart(policy)
        assert sum(spec.num_elements for spec in held.specs) == num_parameters
        for name, item in held.tensors.items():
            if rank < 2:
                assert item.start == ends.get(name, 0), name
                ends[name] = item.start + item.count
        if rank == NUM_RANKS - 1:
            last = {name: item.start + item.count for name, item in held.tensors.items()}
            assert last == {spec.name: spec.num_elements for spec in held.specs}
        assert abs(held.num_elements / num_parameters * NUM_RANKS - 1) < 0.001
        if rank == 0:
            planned = _plan(tmp_path)
            assert planned["masters"] == 4 * held.num_elements
            assert planned["masters"] + planned["moments"] + planned["gradient"] == 16 * held.num_elements


def _plan(folder: Path) -> dict[str, int]:
    """The state of each of the ranks, by its name; also that a step has room beside it on GPUs of 80 GB."""
    plan = memory_plan(
        transformers.AutoConfig.from_pretrained(folder),
        TrainerSettings(tokens_per_microbatch=8192, gradient_sync="micro_batch"),
        ranks=RankLayout(num_ranks=NUM_RANKS),
        placement=Placement(compute="bf16", recompute="full"),
    )
    large = plan.num_parameters > 2**35
    if large:
        with pytest.raises(InvalidArgumentError, match="70,553,706,496 parameters on 16 ranks need"):
            plan.require_room(80 * 10**9, memory="device")
    plan.require_room((130 if large else 80) * 10**9, memory="device")
    return {item.name: item.num_bytes for item in plan.items}


def test_a_rank_of_the_second_replica_holds_its_rows_and_publishes_none() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=7, world_size=NUM_RANKS)
    try:
        policy = _shape("apart")
        mesh = rank_mesh(torch.device("cpu"), num_ranks=NUM_RANKS, num_replicas=4)
        shard(policy, mesh=mesh)
        held, published = HeldPart(policy), HeldPart(policy, publishes=replica_of(mesh) == 0)
        # 33 rows on four ranks: 9, 9, 9, 6.
        rows = held.tensors["lm_head.weight"]
        assert (rows.start, rows.count) == (27 * 16, 6 * 16)
        assert published.specs == held.specs
        assert not published.tensors
        assert WeightCopies(policy, publishes=False).take().open().num_bytes == 0
    finally:
        dist.destroy_process_group()
