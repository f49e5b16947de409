"""Staleness in versions, and its quantiles."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from astraflow_dataflow.rules.staleness import Summary, histogram, staleness, summarize


def test_staleness_counts_versions_and_is_never_negative() -> None:
    assert staleness(base_version=5, oldest_version=3) == 2
    assert staleness(base_version=3, oldest_version=5) == 0


def test_nothing_bound_has_no_staleness() -> None:
    assert summarize({}) == Summary(p50=0.0, p99=0.0, largest=0)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=300))
def test_quantiles_are_those_of_the_nearest_rank(oldest: list[int]) -> None:
    ages = [40 - version for version in oldest]
    summary = summarize(histogram(oldest, base_version=40))
    ranked = sorted(ages)
    assert summary.p50 == ranked[int(np.ceil(0.50 * len(ages))) - 1]
    assert summary.p99 == ranked[int(np.ceil(0.99 * len(ages))) - 1]
    assert summary.largest == max(ages)
