"""What a lag costs is read from the last evaluations, and compared by loss; figures by hand."""

import pytest

from astraflow_bench.studies.staleness import conclude, measure
from astraflow_bench.studies.study import Run
from support.study_results import evaluations, result


def test_m2po_must_be_above_clip_at_lag_32_over_the_curve() -> None:
    ahead = {"heldout": [(0.0, 0.4), (16.0, 0.8), (32.0, 0.6)]}
    behind = {"heldout": [(0.0, 0.4), (16.0, 0.6), (32.0, 0.65)]}
    results = [
        result("m2po-32", 0, late=0.6, curves=ahead),
        result("clip-32", 0, late=0.65, curves=behind),
        result("m2po-8", 0, late=0.6, curves=ahead),
    ]
    mean, late = conclude(results)
    # (0.4 + 0.8) / 4 + (0.8 + 0.6) / 4 = 0.65, and (0.4 + 0.6) / 4 + (0.6 + 0.65) / 4 = 0.5625.
    assert (mean.subject, mean.value, mean.met) == ("lag 32", pytest.approx(0.0875), True)
    assert (late.subject, late.value, late.met) == ("lag 32", pytest.approx(-0.05), None)


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
