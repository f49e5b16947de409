"""Accuracies are read by steps and by rollouts, and compared where each claim is; figures by hand."""

import pytest

from astraflow_bench.studies.data_algorithms import conclude, measure
from astraflow_bench.studies.study import Run
from support.study_results import evaluations, result


def test_rollouts_are_all_that_were_generated_and_accuracies_are_interpolated() -> None:
    account = {"ingested": 20_500, "evaluated": 500}
    run = Run(
        summary={"trajectories": account, "steps": 50},
        metrics=evaluations((0, 0.4), (20, 0.6), (40, 0.8), (50, 0.9)),
        events=[],
    )
    found = measure(run)
    assert found.figures["per_step"] == 400
    # 6000 rollouts are 15 steps.
    assert found.figures["at_rollouts"] == pytest.approx(0.55)
    assert found.figures["at_steps"] == pytest.approx(0.7)
    assert found.curves["rollouts"][1] == (8000, 0.6)


def test_an_algorithm_that_generated_fewer_rollouts_than_compared_has_no_figure_there() -> None:
    summary = {"trajectories": {"ingested": 500, "evaluated": 0}, "steps": 50}
    run = Run(summary=summary, metrics=evaluations((0, 0.4), (50, 0.9)), events=[])
    assert measure(run).figures["at_rollouts"] is None


def test_the_means_of_curves_are_compared_up_to_equal_steps_and_rollouts() -> None:
    curves = {  # linear from 0.4 at the start, so the mean up to an end is half way to what is there
        "uniform": [(0, 0.4), (60, 0.6)],
        "dynamic": [(0, 0.4), (20, 0.6), (60, 1.0)],
        "greso": [(0, 0.4), (20, 0.5), (60, 0.7)],
        "replay": [(0, 0.4), (20, 0.8), (60, 0.8)],
    }
    results = [
        result(arm, seed, curves={"steps": curve, "rollouts": [(400 * x, y) for x, y in curve]})
        for arm, curve in curves.items()
        for seed in range(2)
    ]
    found = {figure.what: figure for figure in conclude(results)}
    # Up to step 30: 0.45, and 0.55 (0.5 for 20 steps, 0.65 for 10).
    assert found["mean held out: dynamic less uniform"].value == pytest.approx(0.1)
    # 6,000 rollouts are 15 steps: 0.475, 0.4375 and 0.55.
    assert found["mean held out: greso less dynamic"].value == pytest.approx(-0.0375)
    assert found["mean held out: greso less dynamic"].met is False
    assert found["mean held out: replay less dynamic"].value == pytest.approx(0.075)
    assert found["mean held out: replay less dynamic"].met is True


def test_a_curve_that_ends_before_is_not_compared() -> None:
    short = {"steps": [(0, 0.4), (20, 0.6)], "rollouts": [(0, 0.4), (5000, 0.6)]}
    assert conclude([result(arm, 0, curves=short) for arm in ("uniform", "dynamic", "greso")]) == []
