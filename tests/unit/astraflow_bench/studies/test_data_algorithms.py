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


def test_data_algorithms_are_compared_where_their_claim_is() -> None:
    accuracy = {"uniform": (0.57, 0.65), "dynamic": (0.69, 0.62), "greso": (0.7, 0.61), "replay": (0.65, 0.7)}
    results = [
        result(arm, seed, at_steps=steps, at_rollouts=rollouts)
        for arm, (steps, rollouts) in accuracy.items()
        for seed in range(2)
    ]
    found = {figure.what: figure for figure in conclude(results)}
    assert found["held out: dynamic less uniform"].value == pytest.approx(0.12)
    assert found["held out: greso less dynamic"].met is False
    assert found["held out: replay less dynamic"].met is True
