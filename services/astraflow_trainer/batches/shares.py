"""Which rank trains on which trajectories of a batch.

Invariant: every trajectory belongs to exactly one rank, tokens are spread evenly, and the answer depends on
the batch and the number of ranks only, so that each rank finds it by itself and a replay finds it again.
Groups may be split: advantages are computed over the whole batch. The batch source asks.
"""

from collections.abc import Sequence

__all__ = ["balanced_shares"]


def balanced_shares(num_tokens: Sequence[int], *, num_ranks: int) -> list[list[int]]:
    """Positions of `num_tokens` for each rank, ascending: the longest first, each to the rank with fewest
    tokens so far.

    No rank has more tokens than another by more than the longest trajectory.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks {num_ranks} must be at least 1")
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for position in sorted(range(len(num_tokens)), key=lambda position: (-num_tokens[position], position)):
        rank = min(range(num_ranks), key=lambda rank: (loads[rank], rank))
        shares[rank].append(position)
        loads[rank] += num_tokens[position]
    return [sorted(share) for share in shares]
