"""What is measured replaces the priors, and what is too small to tell is not counted."""

import pytest

from astraflow_weights.codec.tiles.grid import PartKind
from astraflow_weights.versions.rates import MeasuredRates, PullCosts

MIB = 2**20


def test_by_the_priors_bytes_of_both_kinds_cost_the_same() -> None:
    costs = PullCosts()
    assert costs.bytes_s(1000, PartKind.DELTA) == costs.bytes_s(1000, PartKind.SNAPSHOT) > 0


def test_the_first_measurement_replaces_the_prior_and_the_next_ones_move_it() -> None:
    rates = MeasuredRates(parallel=8)
    rates.fetched(size_bytes=100 * MIB, took_s=1.0)
    assert rates.costs().fetch_s_per_byte == pytest.approx(1 / (100 * MIB))
    rates.fetched(size_bytes=100 * MIB, took_s=2.0)
    assert rates.costs().fetch_s_per_byte == pytest.approx(1.3 / (100 * MIB))


def test_what_is_too_small_says_nothing_about_rates_and_what_is_too_large_nothing_about_latency() -> None:
    rates = MeasuredRates(parallel=8)
    rates.fetched(size_bytes=MIB, took_s=10)
    rates.decoded(PartKind.DELTA, size_bytes=MIB, took_s=10)
    rates.answered(size_bytes=MIB, took_s=10)
    assert rates.costs() == PullCosts(parallel=8)


def test_each_kind_has_its_own_cost_of_decoding() -> None:
    rates = MeasuredRates(parallel=8)
    rates.decoded(PartKind.DELTA, size_bytes=10 * MIB, took_s=1)
    rates.decoded(PartKind.SNAPSHOT, size_bytes=10 * MIB, took_s=3)
    costs = rates.costs()
    assert costs.snapshot_s_per_byte == pytest.approx(3 * costs.delta_s_per_byte)


def test_answers_are_waited_for_side_by_side() -> None:
    rates = MeasuredRates(parallel=4)
    rates.answered(size_bytes=100, took_s=0.3)
    waits_s = [rates.costs().requests_s(objects) for objects in (0, 1, 4, 5, 9)]
    assert waits_s == pytest.approx([0, 0.3, 0.3, 0.6, 0.9], abs=0.0005)
