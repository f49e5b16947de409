"""Which rank trains on which trajectories."""

import numpy as np
import pytest

from astraflow_trainer.batches.shares import balanced_shares


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(5))
def test_every_trajectory_has_one_rank_and_tokens_are_spread_evenly(num_ranks: int, seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 200, 40).tolist()
    shares = balanced_shares(lengths, num_ranks=num_ranks)
    assert sorted(position for share in shares for position in share) == list(range(40))
    loads = [sum(lengths[position] for position in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths)


def test_a_batch_of_equal_rows_is_halved() -> None:
    assert balanced_shares([5, 5, 5, 5], num_ranks=2) == [[0, 2], [1, 3]]


def test_a_long_row_is_weighed_against_many_short_ones() -> None:
    assert balanced_shares([10, 100, 30, 60], num_ranks=2) == [[1], [0, 2, 3]]


def test_more_ranks_than_rows_leave_some_without() -> None:
    assert balanced_shares([7], num_ranks=3) == [[0], [], []]


def test_a_number_of_ranks_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="num_ranks 0 must be at least 1"):
        balanced_shares([1], num_ranks=0)
