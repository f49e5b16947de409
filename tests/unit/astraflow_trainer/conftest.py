"""A tiny policy and a one-process mesh shared by the trainer's tests."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from astraflow_trainer.model.model import PolicyModel, build_causal_lm
from astraflow_trainer.model.sharding import Placement, shard
from support.tiny_training import TINY, MakePolicy


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A CPU mesh of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def make_policy(mesh: DeviceMesh) -> MakePolicy:
    """Builds a tiny policy of two layers, sharded unless told otherwise; equal seeds give equal weights."""

    def make(
        *,
        seed: int = 0,
        sharded: bool = True,
        placement: Placement | None = None,
        **shape_fields: int,
    ) -> PolicyModel:
        shape = replace(TINY, num_hidden_layers=2, **shape_fields)
        policy = PolicyModel(build_causal_lm(shape, seed=seed))
        if sharded:
            shard(policy, mesh=mesh, placement=placement)
        return policy

    return make


@pytest.fixture
def policy(make_policy: MakePolicy) -> PolicyModel:
    """A tiny policy of one rank."""
    return make_policy()


@pytest.fixture
def unsharded(make_policy: MakePolicy) -> PolicyModel:
    """The same policy outside any mesh."""
    return make_policy(sharded=False)
