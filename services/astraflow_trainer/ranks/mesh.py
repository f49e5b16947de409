"""How a trainer's ranks are laid out: so many replicas of the model, each spread over as many ranks.

Invariant: the ranks of a replica follow one another, and the first replica publishes: rank R belongs to replica R //
(ranks of a replica). What cannot be is refused before any memory is taken. The trainer's server and the learner call
it.
"""

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from astraflow.errors import InvalidArgumentError

_REPLICAS, _SHARDS = "replica", "shard"


def require_mesh(*, num_ranks: int, num_replicas: int) -> int:
    """How many ranks hold one model. Raises InvalidArgumentError where the replicas cannot be equally large."""
    if num_replicas > num_ranks or num_ranks % num_replicas:
        possible = [str(number) for number in range(1, num_ranks + 1) if num_ranks % number == 0]
        raise InvalidArgumentError(
            f"ASTRAFLOW_REPLICAS is {num_replicas}, and WORLD_SIZE {num_ranks} ranks cannot be cut into so many equal "
            f"replicas: set it to one of {', '.join(possible)}, or start another number of ranks"
        )
    return num_ranks // num_replicas


def rank_mesh(device: torch.device, *, num_ranks: int, num_replicas: int = 1) -> DeviceMesh:
    """The mesh of all ranks, over which parameters are sharded, and with several replicas repeated; a collective."""
    num_shards = require_mesh(num_ranks=num_ranks, num_replicas=num_replicas)
    if num_replicas == 1:
        return init_device_mesh(device.type, (num_ranks,))
    return init_device_mesh(device.type, (num_replicas, num_shards), mesh_dim_names=(_REPLICAS, _SHARDS))


def replica_of(mesh: DeviceMesh) -> int:
    """Which replica this rank holds a part of, from 0; the first one publishes."""
    return mesh.get_local_rank(_REPLICAS) if mesh.ndim == 2 else 0


def from_first_replica(values: torch.Tensor, *, mesh: DeviceMesh) -> None:
    """Overwrite `values` with those of the rank that holds the same part in the first replica; a collective."""
    if mesh.ndim == 2:
        torch.distributed.broadcast(values, group=mesh.get_group(_REPLICAS), group_src=0)
