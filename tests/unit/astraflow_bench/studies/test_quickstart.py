"""A seed has learned when it ends high and well above its start; nine of ten must."""

import pytest

from astraflow_bench.studies.quickstart import conclude, measure
from astraflow_bench.studies.study import Run
from support.study_results import result


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
    assert measure(Run(summary=summary, metrics=[], events=[])).figures["learned"] == learned


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
    figures = conclude([*results, result("control", 0, learned=control)])
    assert all(figure.met for figure in figures) is met
