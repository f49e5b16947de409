"""Staleness in versions, and its quantiles."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.dataflow.v1 import batch_pb2
from astraflow.recipe import BatchSettings
from astraflow_dataflow.rules.staleness import Summary, deadline_version, histogram, staleness, summarize


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


@pytest.mark.parametrize(
    ("correction", "version"),
    [(None, 3), ({"correction": "mask"}, 5), ({"correction": "reweight", "max_excess": 7}, 10)],
    ids=["drop", "mask", "reweight"],
)
def test_a_group_counts_as_sampled_with_the_version_that_decides_when_it_is_stale(
    correction: dict[str, object] | None, version: int
) -> None:
    # Sampled by versions 3 to 6, and by version 5 alone: all have a token of version 5 or newer.
    items = [
        batch_pb2.BatchItem(min_version=3, max_version=6),
        batch_pb2.BatchItem(min_version=5, max_version=5),
    ]
    settings = BatchSettings.model_validate({"stale_tokens": correction})
    assert deadline_version(items, settings) == version
