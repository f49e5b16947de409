"""Ranks are cut into equal replicas, or refused before anything is loaded."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from astraflow.errors import InvalidArgumentError
from astraflow_trainer.ranks.mesh import from_first_replica, rank_mesh, replica_of, require_mesh


@pytest.mark.parametrize(
    ("num_ranks", "num_replicas", "each"), [(1, 1, 1), (8, 1, 8), (8, 2, 4), (8, 8, 1), (6, 3, 2)]
)
def test_replicas_are_equally_large(num_ranks: int, num_replicas: int, each: int) -> None:
    assert require_mesh(num_ranks=num_ranks, num_replicas=num_replicas) == each


@pytest.mark.parametrize(("num_ranks", "num_replicas"), [(1, 2), (6, 4), (4, 8)])
def test_others_are_refused_with_the_numbers_that_are_possible(num_ranks: int, num_replicas: int) -> None:
    with pytest.raises(
        InvalidArgumentError, match=rf"WORLD_SIZE {num_ranks} ranks cannot .* set it to one of 1, "
    ):
        require_mesh(num_ranks=num_ranks, num_replicas=num_replicas)


@pytest.mark.parametrize(("rank", "replica"), [(0, 0), (3, 0), (4, 1), (7, 1)])
def test_the_ranks_of_a_replica_follow_one_another(rank: int, replica: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    try:
        mesh = rank_mesh(torch.device("cpu"), num_ranks=8, num_replicas=2)
        assert replica_of(mesh) == replica
        assert mesh.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        flat = rank_mesh(torch.device("cpu"), num_ranks=8)
        assert replica_of(flat) == 0
        from_first_replica(torch.zeros(1), mesh=flat)
    finally:
        dist.destroy_process_group()
