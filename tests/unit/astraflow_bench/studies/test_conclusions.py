"""What the studies read from a run, and when they meet their targets; figures by hand."""

from typing import Any

import pytest

from astraflow_bench.studies import data_algorithms, quickstart, staleness, two_policies, weights_in_training
from astraflow_bench.studies.study import Measured, Result, Run


def result(arm: str, seed: int, **figures: float) -> Result:
    return Result(
        arm=arm, seed=seed, recipe="", measured=Measured(figures=figures), machine="", date="", commit="", load=0,
        seconds=0,
    )  # fmt: skip


def evaluations(*points: tuple[int, float]) -> list[dict[str, Any]]:
    return [
        {"kind": "evaluation", "policy": "solver", "version": version, "heldout_reward": reward}
        for version, reward in points
    ]


@pytest.mark.parametrize(
    ("first", "last", "learned"),
    [
        (0.2, 0.70, 1),
        (0.2, 0.69, 0),
        (0.5, 0.75, 1),
        (0.5, 0.74, 0),
        (0.75, 0.99, 0),
        (None, 0.8, 0),
        (0.2, None, 0),
    ],
)
def test_a_seed_has_learned_when_it_ends_high_and_well_above_its_start(
    first: float | None, last: float | None, learned: int
) -> None:
    summary = {
        "heldout_first": first, "heldout_last": last, "steps": 1, "first_reward_s": 1, "wall_s": 1,
        "staleness": {"max": 1}, "delta_bytes_mean": 1, "snapshot_bytes": 1, "density_mean": 1, "peak_pss_bytes": 1,
        "conservation_error": 0,
    }  # fmt: skip
    assert quickstart.measure(Run(summary=summary, metrics=[], events=[])).figures["learned"] == learned


@pytest.mark.parametrize(
    ("learned", "seeds", "control", "met"),
    [
        (10, 10, 0, True),
        (9, 10, 0, True),
        (8, 10, 0, False),
        (10, 10, 1, False),
        (3, 3, 0, True),
        (2, 3, 0, False),
    ],
)
def test_nine_of_ten_seeds_must_learn_rounded_up_and_the_control_must_not(
    learned: int, seeds: int, control: int, met: bool
) -> None:
    results = [result("recipe", seed, learned=seed < learned) for seed in range(seeds)]
    figures = quickstart.conclude([*results, result("control", 0, learned=control)])
    assert all(figure.met for figure in figures) is met


def test_rollouts_are_all_that_were_generated_and_accuracies_are_interpolated() -> None:
    account = {"ingested": 20_500, "evaluated": 500}
    run = Run(
        summary={"trajectories": account, "steps": 50},
        metrics=evaluations((0, 0.4), (20, 0.6), (40, 0.8), (50, 0.9)),
        events=[],
    )
    found = data_algorithms.measure(run)
    assert found.figures["per_step"] == 400
    # 6000 rollouts are 15 steps.
    assert found.figures["at_rollouts"] == pytest.approx(0.55)
    assert found.figures["at_steps"] == pytest.approx(0.7)
    assert found.curves["rollouts"][1] == (8000, 0.6)


def test_an_algorithm_that_generated_fewer_rollouts_than_compared_has_no_figure_there() -> None:
    summary = {"trajectories": {"ingested": 500, "evaluated": 0}, "steps": 50}
    run = Run(summary=summary, metrics=evaluations((0, 0.4), (50, 0.9)), events=[])
    assert data_algorithms.measure(run).figures["at_rollouts"] is None


def test_data_algorithms_are_compared_where_their_claim_is() -> None:
    accuracy = {"uniform": (0.57, 0.65), "dynamic": (0.69, 0.62), "greso": (0.7, 0.61), "replay": (0.65, 0.7)}
    results = [
        result(arm, seed, at_steps=steps, at_rollouts=rollouts)
        for arm, (steps, rollouts) in accuracy.items()
        for seed in range(2)
    ]
    found = {figure.what: figure for figure in data_algorithms.conclude(results)}
    assert found["held out: dynamic less uniform"].value == pytest.approx(0.12)
    assert found["held out: greso less dynamic"].met is False
    assert found["held out: replay less dynamic"].met is True


def test_m2po_must_be_above_clip_at_lag_32() -> None:
    results = [result("m2po-32", 0, late=0.6), result("clip-32", 0, late=0.65), result("m2po-8", 0, late=0.6)]
    (found,) = staleness.conclude(results)
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
    figures = staleness.measure(run).figures
    assert (figures["late"], figures["best"], figures["staleness"]) == (pytest.approx(0.65), 0.7, 31)
    assert figures["clipped"] == pytest.approx(0.03)


def test_versions_are_counted_without_the_first_which_is_whole() -> None:
    sizes = [(0, 0.0, 0, 1000), (1, 0.1, 100, 0), (2, 0.3, 300, 0)]
    versions = [
        {
            "kind": "version", "policy": "solver", "version": number, "density": density, "delta_bytes": delta,
            "snapshot_bytes": whole,
        }
        for number, density, delta, whole in sizes
    ]  # fmt: skip
    run = Run(summary={"heldout_last": 0.9}, metrics=versions, events=[])
    figures = weights_in_training.measure(run).figures
    assert figures["density"] == pytest.approx(0.2)
    assert (figures["density_first"], figures["density_last"]) == (0.1, 0.3)
    assert figures["delta_share"] == pytest.approx(0.2)


@pytest.mark.parametrize(("together", "met"), [((0.70, 0.72), True), ((0.60, 0.61), False)])
def test_together_may_be_lower_by_noise_only(together: tuple[float, float], met: bool) -> None:
    results = [result("together", seed, solver=reward, no_credit=0) for seed, reward in enumerate(together)]
    results += [result("solver-alone", seed, solver=reward) for seed, reward in enumerate((0.71, 0.71))]
    found = two_policies.conclude(results)
    assert all(figure.met is not False for figure in found) is met
