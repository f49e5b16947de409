"""Lanes hold whole rows, the same rows always pack alike, and trained tokens keep their predecessors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from astraflow_trainer.batches.packing import fill_lanes, filler, pack
from support.tiny_training import make_row


def test_first_fit_decreasing_places_the_longest_first() -> None:
    assert fill_lanes([3, 5, 2, 4, 1], capacity=6) == [[1, 4], [3, 2], [0]]


@given(st.lists(st.integers(1, 20), max_size=40), st.integers(20, 50))
def test_every_row_is_in_one_lane_and_no_lane_is_overfull(lengths: list[int], capacity: int) -> None:
    lanes = fill_lanes(lengths, capacity=capacity)
    assert sorted(index for lane in lanes for index in lane) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in lane) <= capacity for lane in lanes)
    # Two lanes that are both at most half full would have been one.
    assert sum(sum(lengths[index] for index in lane) <= capacity // 2 for lane in lanes) <= 1


def test_two_rows_in_a_lane_have_own_positions_and_a_block_mask() -> None:
    rows = [make_row([1, 2], [3], logprobs=[-0.25]), make_row([4], [5], logprobs=[-0.5], temperature=0.5)]
    (batch,) = pack(rows, token_budget=16, lane_tokens=6)
    assert batch.token_ids_BL.tolist() == [[1, 2, 3, 4, 5]]
    assert batch.position_ids_BL.tolist() == [[0, 1, 2, 0, 1]]
    assert batch.document_ids_BL.tolist() == [[0, 0, 0, 1, 1]]
    mask = batch.attention_mask()
    assert mask is not None
    assert torch.equal(mask[0, 0].float(), torch.block_diag(torch.ones(3, 3), torch.ones(2, 2)).tril())
    assert batch.source_N.tolist() == [1, 3]
    assert batch.target_N.tolist() == [3, 5]
    assert batch.row_N.tolist() == [0, 1]
    assert batch.behavior_logprob_N.tolist() == [-0.25, -0.5]
    assert batch.temperature_N.tolist() == [1.0, 0.5]


def test_one_row_per_lane_needs_no_mask() -> None:
    (batch,) = pack([make_row([1, 2], [3]), make_row([4], [5])], token_budget=6)
    assert batch.token_ids_BL.tolist() == [[1, 2, 3], [4, 5, 0]]
    assert batch.attention_mask() is None
    assert batch.num_row_tokens == 5


def test_padding_never_leaves_a_query_without_a_key() -> None:
    rows = [make_row([1] * 5, [3]), make_row([1], [3]), make_row([1], [3])]
    (batch,) = pack(rows, token_budget=14, lane_tokens=7)
    mask = batch.attention_mask()
    assert mask is not None
    assert bool(mask.any(dim=-1).all())


@given(st.integers(9, 60), st.integers(1, 40))
def test_micro_batches_stay_within_the_budget_and_hold_each_row_once(budget: int, num_rows: int) -> None:
    lengths = [2 + (7 * index) % 8 for index in range(num_rows)]
    rows = [make_row([0], list(range(1, length))) for length in lengths]
    batches = pack(rows, token_budget=budget)
    assert all(batch.token_ids_BL.numel() <= budget for batch in batches)
    trained = torch.cat([batch.row_N for batch in batches])
    assert sorted(trained.unique().tolist()) == list(range(num_rows))
    assert sum(batch.num_row_tokens for batch in batches) == sum(lengths)


def test_a_row_beyond_the_budget_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="raise tokens_per_microbatch to at least 6"):
        pack([make_row([1] * 5, [2])], token_budget=5)


def test_nothing_packs_to_nothing_and_a_filler_trains_nothing() -> None:
    assert pack([], token_budget=8) == []
    assert filler().target_N.numel() == 0
