"""What a lag costs is read from the last evaluations, and compared by loss; figures by hand."""

import pytest

from astraflow_bench.studies.staleness import conclude, measure
from astraflow_bench.studies.study import Run
from support.study_results import evaluations, result


def test_m2po_must_be_above_clip_at_lag_32() -> None:
    results = [result("m2po-32", 0, late=0.6), result("clip-32", 0, late=0.65), result("m2po-8", 0, late=0.6)]
    (found,) = conclude(results)
    assert (found.subject, found.value, found.met) == ("lag 32", pytest.approx(-0.05), False)


def test_staleness_takes_the_last_two_evaluations_and_leaves_skipped_steps_out() -> None:
    taken = {
        "staleness_mean": 32.0,
        "clip_fraction_up": 0.02,
        "clip_fraction_down": 0.01,
        "second_moment": 0.05,
    }
    steps = [
        {"kind": "step", "policy": "solver", **taken},
        {"kind": "step", "policy": "solver", "staleness_mean": 30.0},
    ]
    run = Run(summary={}, metrics=[*steps, *evaluations((0, 0.3), (16, 0.7), (32, 0.6))], events=[])
    figures = measure(run).figures
    assert (figures["late"], figures["best"], figures["staleness"]) == (pytest.approx(0.65), 0.7, 31)
    assert figures["clipped"] == pytest.approx(0.03)
