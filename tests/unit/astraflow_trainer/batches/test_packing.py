"""Lanes hold whole rows, the same rows always pack alike, and trained tokens keep their predecessors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from astraflow_trainer.batches.packing import (
    MicroBatch,
    attention_mask,
    fill_lanes,
    filler,
    pack,
    plan_lanes,
)
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
    mask = attention_mask(batch.document_ids_BL)
    assert torch.equal(mask[0, 0].float(), torch.block_diag(torch.ones(3, 3), torch.ones(2, 2)).tril())
    assert batch.source_N.tolist() == [1, 3]
    assert batch.target_N.tolist() == [3, 5]
    assert batch.row_N.tolist() == [0, 1]
    assert batch.behavior_logprob_N.tolist() == [-0.25, -0.5]
    assert batch.temperature_N.tolist() == [1.0, 0.5]


def test_one_row_per_lane_needs_no_mask() -> None:
    (batch,) = pack([make_row([1, 2], [3]), make_row([4], [5])], token_budget=6)
    assert batch.token_ids_BL.tolist() == [[1, 2, 3], [4, 5, 0]]
    assert batch.one_row_per_lane
    assert batch.num_row_tokens == 5


def test_padding_never_leaves_a_query_without_a_key() -> None:
    rows = [make_row([1] * 5, [3]), make_row([1], [3]), make_row([1], [3])]
    (batch,) = pack(rows, token_budget=14, lane_tokens=7)
    mask = attention_mask(batch.document_ids_BL)
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


def test_a_long_row_makes_no_short_one_share_its_length() -> None:
    """100 rows of 20 tokens and one of 2,000: in lanes of 2,000, attention would be computed for 4,000 tokens each."""
    rows = [make_row([1] * 10, [2] * 10) for _ in range(100)]
    batches = pack([*rows, make_row([1], [2] * 1999)], token_budget=8192, attention_tokens=400)
    assert batches[0].token_ids_BL.shape == (1, 2000)
    assert batches[0].one_row_per_lane
    assert max(batch.token_ids_BL.shape[1] for batch in batches[1:]) <= 250
    assert sum(batch.num_row_tokens for batch in batches) == 4000


@given(
    st.lists(st.integers(2, 500), min_size=1, max_size=40),
    st.sampled_from([32, 100, 4096]),
    st.integers(0, 3),
)
def test_whatever_is_chosen_costs_no_more_than_one_lane_length_for_all(
    lengths: list[int], attention_tokens: int, doublings: int
) -> None:
    budget = max(lengths) << doublings
    plans = [plan_lanes(lengths, shared=shared) for shared in (max(lengths), max(lengths) // 2 or 1)]
    for plan in plans:
        chunks = plan.chunks(budget)
        assert sorted(index for chunk in chunks for lane in chunk for index in lane) == list(
            range(len(lengths))
        )
        assert all(
            len(chunk) * max(sum(lengths[index] for index in lane) for lane in chunk) <= budget
            for chunk in chunks
        )
    rows = [make_row([0], [1] * (length - 1)) for length in lengths]
    chosen = pack(rows, token_budget=budget, attention_tokens=attention_tokens)
    assert _cost(chosen, attention_tokens) <= plans[0].cost(budget, attention_tokens=attention_tokens)


def _cost(batches: list[MicroBatch], attention_tokens: float) -> float:
    """As the plan counts it, but of the shapes that are computed, and each mask for itself."""
    return sum(
        128
        + batch.token_ids_BL.numel()
        * (1 + batch.token_ids_BL.shape[1] / attention_tokens / (2 if batch.one_row_per_lane else 1))
        for batch in batches
    )


def test_rows_of_one_length_share_one_class() -> None:
    plan = plan_lanes([7, 7, 7, 7], shared=7)
    assert [(held.capacity, held.is_shared) for held in plan.classes] == [(7, False)]


def test_rows_above_the_bound_are_with_those_of_their_length() -> None:
    plan = plan_lanes([90, 9, 55, 21, 3, 51, 12], shared=12)
    assert [held.lanes for held in plan.classes] == [[[0], [2], [5]], [[3]], [[6], [1, 4]]]
    assert [held.capacity for held in plan.classes] == [90, 21, 12]
