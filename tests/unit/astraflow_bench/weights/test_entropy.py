"""Bounds are those of the textbook."""

import numpy as np
import pytest

from astraflow_bench.weights.entropy import bounds


def test_one_change_in_two_of_one_kind_costs_one_bit_per_element() -> None:
    base = np.full(1000, 0x3F80, np.uint16)
    target = base.copy()
    target[:500] += 1
    found = bounds({"w": base}, {"w": target})
    assert (found.num_elements, found.num_changed, found.one_unit) == (1000, 500, 500)
    assert found.plain_bits == pytest.approx(1000)
    assert found.context_bits == pytest.approx(1000)


def test_what_the_exponent_tells_is_free_in_the_context_bound() -> None:
    base = np.tile(np.array([0x3F80, 0x3C00], np.uint16), 500)
    target = base + np.tile(np.array([0, 0xFFFF], np.uint16), 500)
    found = bounds({"w": base}, {"w": target})
    assert found.plain_bits == pytest.approx(1000)
    assert found.context_bits == pytest.approx(0)


def test_two_kinds_of_steps_cost_a_bit_each() -> None:
    base = np.zeros(64, np.uint16)
    target = np.tile(np.array([1, 0xFFFF], np.uint16), 32)
    assert bounds({"w": base}, {"w": target}).plain_bits == pytest.approx(64)
