"""Staleness: the age of a trajectory in versions of its policy, at the step that uses it.

Pure. Judged when a batch is bound, against the version the step starts from; negative ages (a resumed trainer
starts from an older version) count as 0. Called by batching and reporting.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from astraflow.dataflow.v1 import batch_pb2
from astraflow.recipe.dataflow import BatchSettings


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Quantiles over trajectories, in versions."""

    p50: float
    p99: float
    largest: int


def staleness(*, base_version: int, oldest_version: int) -> int:
    """Return the age of a trajectory for a step that starts from `base_version`."""
    return max(0, base_version - oldest_version)


def deadline_version(items: Iterable[batch_pb2.BatchItem], settings: BatchSettings) -> int:
    """Return the version that a group counts as sampled with: it is stale more than `max_staleness` versions later.

    That of its oldest token; where stale tokens are masked, the newest that every trajectory has a token of.
    """
    correction = settings.stale_tokens
    if correction is None:
        return min(item.min_version for item in items)
    if correction.correction == "mask":
        return min(item.max_version for item in items)
    return min(item.min_version for item in items) + correction.max_excess


def histogram(oldest_versions: Iterable[int], *, base_version: int) -> dict[int, int]:
    """Return age → trajectories."""
    ages: dict[int, int] = {}
    for oldest in oldest_versions:
        age = staleness(base_version=base_version, oldest_version=oldest)
        ages[age] = ages.get(age, 0) + 1
    return ages


def summarize(ages: Mapping[int, int]) -> Summary:
    """Return the quantiles of a histogram by nearest rank; zeros when it is empty."""
    total = sum(ages.values())
    if total == 0:
        return Summary(p50=0.0, p99=0.0, largest=0)
    return Summary(p50=_rank(ages, 0.50 * total), p99=_rank(ages, 0.99 * total), largest=max(ages))


def _rank(ages: Mapping[int, int], rank: float) -> float:
    seen = 0
    for age in sorted(ages):
        seen += ages[age]
        if seen >= rank:
            return float(age)
    raise AssertionError("a rank within the total is always reached")
