"""The staleness window that a recipe asks for; what is free of it is tested through the store."""

import pytest

from astraflow_dataflow.rules.window import Window


@pytest.mark.parametrize(
    ("max_staleness", "groups_per_step", "groups", "memory"),
    [(0, 16, 16, 32), (1, 4, 8, 8), (8, 7, 63, 14), (0, 1, 1, 8)],
)
def test_a_window_holds_a_step_more_than_its_staleness_and_remembers_two(
    max_staleness: int, groups_per_step: int, groups: int, memory: int
) -> None:
    bounds = {"max_staleness": max_staleness, "groups_per_step": groups_per_step}
    window = Window(policy_id="solver", min_acceptance=0.1, **bounds)
    assert (window.groups, window.smoothing) == (groups, 1 / memory)


def test_a_policy_that_takes_no_step_has_a_closed_window() -> None:
    window = Window(policy_id="solver", max_staleness=1, groups_per_step=4, steps=0, min_acceptance=0.1)
    assert window.groups == 0
