"""Means over seeds, and differences of paired ones. Pure; called by the studies and by `page`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from astraflow_bench.studies.study import Result


def paired(results: Sequence[Result], arm: str, other: str) -> list[tuple[Result, Result]]:
    """The results of two arms of equal seeds, by seed."""
    first, second = ({one.seed: one for one in results if one.arm == name} for name in (arm, other))
    return [(first[seed], second[seed]) for seed in sorted(first.keys() & second.keys())]


def error_of(values: Sequence[float]) -> float:
    """Standard error of the mean; NaN of fewer than two values."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def spread(values: Sequence[float]) -> str:
    """Error and number of values, as a table says it."""
    return f"± {error_of(values):.2g} (n {len(values)})" if len(values) > 1 else "(n 1)"


def mean_of(results: Sequence[Result], arm: str, figure: str) -> tuple[float, float, int]:
    """Mean, standard error and number of a figure over the seeds of an arm; NaN where none has it."""
    found = [one.number(figure) for one in results if one.arm == arm]
    known = [value for value in found if not math.isnan(value)]
    return (fmean(known) if known else math.nan), error_of(known), len(known)
