"""The three M2PO bounds against hand-computed numbers and against brute force."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from astraflow.recipe.algorithm import M2po, M2poClip, M2poMask, PpoClip
from astraflow_trainer.step.losses.second_moment import (
    UNCLIPPED,
    mask_threshold,
    sorted_suffix_bounds,
    water_filling_bounds,
)

distances = st.lists(st.floats(0, 3), min_size=1, max_size=30)
budgets = st.floats(1e-3, 2)


def _squares(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).square()


def test_within_the_budget_nothing_is_clipped() -> None:
    assert water_filling_bounds(_squares([0.1, 0.2]), region=M2po(budget=0.04)) == UNCLIPPED
    assert water_filling_bounds(torch.zeros(0, dtype=torch.float64), region=M2po()) == UNCLIPPED


def test_water_filling_is_never_tighter_than_its_floors() -> None:
    # Two tokens at distance 1, budget 0.01: t = 0.1, whose bounds 0.095 and 0.105 are below the floors.
    bounds = water_filling_bounds(_squares([1.0, 1.0]), region=M2po(budget=0.01))
    assert bounds == PpoClip(low=0.3, high=0.5)


@given(distances, budgets)
def test_water_filling_equals_bisection(values: list[float], budget: float) -> None:
    squares = _squares(values)
    region = M2po(budget=budget, floor_low=0.0, floor_high=0.0)
    bounds = water_filling_bounds(squares, region=region)
    if float(squares.mean()) <= budget:
        assert bounds == UNCLIPPED
        return
    low, high = 0.0, 10.0
    for _ in range(200):
        middle = (low + high) / 2
        if float(squares.clamp(max=middle**2).mean()) < budget:
            low = middle
        else:
            high = middle
    assert math.log1p(bounds.high) == pytest.approx(low, rel=1e-6, abs=1e-9)
    assert -math.log1p(-bounds.low) == pytest.approx(low, rel=1e-5, abs=1e-9)


def test_sorted_suffix_by_hand() -> None:
    # Descending d²: 4, 1, 0.04, 0.01; suffix means 1.2625, 0.35, 0.025, 0.01; budget 0.5 → d² = 1.
    bounds = sorted_suffix_bounds(_squares([0.1, 2.0, 0.2, 1.0]), region=M2poClip(budget=0.5))
    assert bounds.low == pytest.approx(1 - math.exp(-1))
    assert bounds.high == pytest.approx(math.e - 1)


def test_sorted_suffix_within_the_budget_or_beyond_the_caps_uses_the_caps() -> None:
    assert sorted_suffix_bounds(_squares([0.01]), region=M2poClip()) == PpoClip(low=0.95, high=20.0)
    wide = sorted_suffix_bounds(_squares([3.9, 4.0, 9.0]), region=M2poClip(budget=17.0))
    assert wide == PpoClip(low=0.95, high=20.0)


@given(distances, budgets)
def test_sorted_suffix_equals_its_definition(values: list[float], budget: float) -> None:
    squares = _squares(values)
    bounds = sorted_suffix_bounds(squares, region=M2poClip(budget=budget, cap_low=1.0, cap_high=1e9))
    if float(squares.mean()) <= budget:
        return
    descending = sorted(squares.tolist(), reverse=True)
    suffix_means = [sum(descending[k:]) / len(descending[k:]) for k in range(len(descending))]
    if any(abs(mean - budget) < 1e-9 for mean in suffix_means):
        return
    first = next((k for k, mean in enumerate(suffix_means) if mean < budget), len(descending) - 1)
    assert math.log1p(bounds.high) == pytest.approx(math.sqrt(descending[first]), rel=1e-6, abs=1e-9)


@given(distances, budgets)
def test_mask_keeps_the_most_tokens_whose_mean_is_below_budget(values: list[float], budget: float) -> None:
    squares = _squares(values)
    threshold = mask_threshold(squares, region=M2poMask(budget=budget)).threshold
    kept = squares[squares < threshold]
    assert not kept.numel() or float(kept.mean()) < budget + 1e-12
    dropped = squares[squares >= threshold]
    if dropped.numel():
        # One more (all that tie with it) would exceed the budget.
        tied = squares[squares <= dropped.min()]
        assert float(tied.mean()) >= budget - 1e-12


def test_mask_within_the_budget_drops_nothing() -> None:
    assert mask_threshold(_squares([0.1, 0.1]), region=M2poMask()).threshold == math.inf
