"""The plan says what a step takes, and refuses what has no room, with the arithmetic."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.distributed.device_mesh import DeviceMesh

from astraflow.errors import InvalidArgumentError
from astraflow.recipe import OptimizerSettings, TrainerSettings
from astraflow_trainer.batches.rows import TrainingRow
from astraflow_trainer.model.model import (
    CriticModel,
    ModelShape,
    PolicyModel,
    build_causal_lm,
    config_of,
    local_part,
)
from astraflow_trainer.model.optimizer import MasterOptimizer
from astraflow_trainer.model.sharding import Placement, Recompute, shard
from astraflow_trainer.planning.activations import activations_of
from astraflow_trainer.planning.memory_plan import MemoryPlan, RankLayout, memory_plan
from astraflow_trainer.step.step import StepSettings, train_step
from support.peak_memory import PeakMemory
from support.tiny_training import make_row

TOKENS = 1024
SHAPE = ModelShape(
    vocab_size=2048, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, intermediate_size=384, max_position_embeddings=TOKENS,
)  # fmt: skip


def _rows() -> list[TrainingRow]:
    """Two micro-batches of rows that fill lanes."""
    generator, length = np.random.default_rng(0), 256
    return [
        make_row(
            generator.integers(0, 2048, 1).tolist(), generator.integers(0, 2048, length - 1).tolist(),
            logprobs=[-7.6] * (length - 1), reward=float(index % 2), group=f"g{index // 2}", name=f"t{index}",
        )
        for index in range(2 * TOKENS // length)
    ]  # fmt: skip


def _plan(placement: Placement, *, on_gpu: bool = False, num_ranks: int = 1, **fields: Any) -> MemoryPlan:
    training = TrainerSettings.model_validate({"tokens_per_microbatch": TOKENS} | fields)
    ranks = RankLayout(num_ranks=num_ranks, on_gpu=on_gpu)
    return memory_plan(config_of(SHAPE), training, ranks=ranks, placement=placement)


def _bytes(plan: MemoryPlan, *names: str) -> int:
    return sum(item.num_bytes for item in plan.items if item.name in names)


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_step_takes_what_was_planned(mesh: DeviceMesh, compute: Any, recompute: Recompute) -> None:
    """Every tensor of model, optimizer and step is counted; the plan is never less, and at most a tenth more."""
    placement = Placement(compute=compute, recompute=recompute)
    settings = OptimizerSettings(warmup_steps=0)
    with PeakMemory() as memory:
        policy = PolicyModel(build_causal_lm(SHAPE, seed=0)).train()
        shard(policy, mesh=mesh, placement=placement)
        optimizer = MasterOptimizer(policy, settings=settings)
        optimizer.state()
        memory.peak = 0
        step = StepSettings(tokens_per_microbatch=TOKENS)
        train_step(policy, optimizer=optimizer, rows=_rows(), settings=step)
    plan = _plan(placement, optimizer=settings.model_dump())
    planned = plan.total("host") - _bytes(plan, "versions", "checkpoint")
    assert 1.0 <= planned / memory.peak <= 1.1


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "muon"])
@pytest.mark.parametrize("average", [None, {}])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_the_state_is_what_a_census_finds(mesh: DeviceMesh, kind: Any, average: Any, compute: Any) -> None:
    placement = Placement(compute=compute)
    settings = OptimizerSettings.model_validate({"kind": kind, "average": average})
    policy = PolicyModel(build_causal_lm(SHAPE, seed=0))
    shard(policy, mesh=mesh, placement=placement)
    optimizer = MasterOptimizer(policy, settings=settings)
    tensors = [*policy.parameters(), *optimizer.masters.values(), *optimizer.state().values()]
    storages = {local_part(tensor).untyped_storage().data_ptr(): local_part(tensor) for tensor in tensors}
    found = sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
    plan = _plan(placement, optimizer=settings.model_dump())
    assert _bytes(plan, "masters", "weights", "moments", "average") == pytest.approx(found, rel=1e-4)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_the_state_of_a_critic_is_what_a_census_finds(mesh: DeviceMesh, compute: Any) -> None:
    placement = Placement(compute=compute)
    critic = CriticModel(build_causal_lm(SHAPE, seed=0))
    shard(critic, mesh=mesh, placement=placement)
    optimizer = MasterOptimizer(critic, settings=OptimizerSettings())
    tensors = [*critic.parameters(), *optimizer.masters.values(), *optimizer.state().values()]
    storages = {local_part(tensor).untyped_storage().data_ptr(): local_part(tensor) for tensor in tensors}
    found = sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
    plain, plan = (_plan(placement, algorithm=given) for given in ({}, {"preset": "ppo"}))
    assert _bytes(plan, "critic's masters", "critic's moments") == pytest.approx(found, rel=1e-4)
    # And the reference of its KL term, frozen.
    more = {"critic's masters", "critic's gradient", "critic's moments", "critic's checkpoint", "reference"}
    assert {item.name for item in plan.items} - {item.name for item in plain.items} == more
    assert _bytes(plan, "reference") == (2 if compute == "bf16" else 4) * plan.num_parameters


def test_a_gpu_keeps_16_bytes_of_state_a_parameter_and_none_with_offload() -> None:
    bf16 = _plan(Placement(compute="bf16"), on_gpu=True)
    state = ("masters", "gradient", "moments")
    assert _bytes(bf16, *state) == 16 * bf16.num_parameters
    offloaded = _plan(Placement(compute="bf16", offload=True), on_gpu=True)
    on_device = {item.name: item.num_bytes for item in offloaded.items if item.memory == "device"}
    assert not on_device.keys() & set(state)
    assert on_device["last version"] == 2 * offloaded.num_parameters, "of 6 bytes that are allowed"


def test_ranks_share_the_state_and_a_replica_does_not() -> None:
    one, four = (_plan(Placement(), num_ranks=number) for number in (1, 4))
    assert _bytes(four, "masters") == pytest.approx(_bytes(one, "masters") / 4, rel=0.01)
    assert _bytes(four, "activations") == _bytes(one, "activations")
    training = TrainerSettings(tokens_per_microbatch=TOKENS)
    replicas = RankLayout(num_ranks=4, num_replicas=2)
    two = memory_plan(config_of(SHAPE), training, ranks=replicas, placement=Placement(), only_state=True)
    assert _bytes(two, "masters") == pytest.approx(_bytes(one, "masters") / 2, rel=0.01)
    assert not _bytes(two, "activations")


def test_a_gradient_that_is_sent_at_once_is_not_kept_whole() -> None:
    step, each = (_plan(Placement(), num_ranks=4, gradient_sync=when) for when in ("step", "micro_batch"))
    kept = _bytes(step, "gradient, not yet reduced") - _bytes(each, "gradient, not yet reduced")
    assert kept == pytest.approx(4 * 0.75 * step.num_parameters, rel=0.01)


def test_what_has_no_room_is_refused_with_the_arithmetic() -> None:
    plan = _plan(Placement(compute="bf16"), on_gpu=True)
    needed = plan.total("device")
    plan.require_room(needed, memory="device")
    with pytest.raises(InvalidArgumentError) as refused:
        plan.require_room(needed - 1, memory="device")
    for part in (f"masters 4.0 MiB (4 B × {plan.num_parameters:,})", "activations ", "Take more ranks"):
        assert part in refused.value.message


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_every_kind_of_model_can_be_planned_without_memory(model_type: str) -> None:
    config = transformers.AutoConfig.for_model(
        model_type, vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, intermediate_size=64,
        **({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16} if "moe" in model_type else {}),
    )  # fmt: skip
    kept = {
        recompute: activations_of(config, dtype=torch.bfloat16, recompute=recompute)
        for recompute in ("none", "selective", "full")
    }
    assert kept["none"].layer > kept["selective"].layer > kept["full"].layer == 2 * 32
    for found in kept.values():
        assert found.layer + found.layer_again == kept["none"].layer
        assert found.others == kept["none"].others
