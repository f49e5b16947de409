"""The admission equation: never over the window, never a group less than it allows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from astraflow_dataflow.rules.window import Window, free_groups, is_admissible, next_acceptance

windows = st.builds(
    Window,
    max_staleness=st.integers(0, 16),
    groups_per_step=st.integers(1, 512),
    min_acceptance=st.floats(0.05, 1.0),
)
counts = st.integers(0, 2000)
averages = st.floats(0.0, 1.0)


@given(windows, counts, counts, counts, averages)
def test_leasing_what_is_free_satisfies_the_equation_and_one_more_does_not(
    window: Window, outstanding: int, ready: int, unpublished: int, acceptance: float
) -> None:
    free = free_groups(
        window, outstanding=outstanding, ready=ready, unpublished=unpublished, acceptance=acceptance
    )
    state = {"ready": ready, "unpublished": unpublished, "acceptance": acceptance}
    if free:
        assert is_admissible(window, outstanding=outstanding + free, **state)  # type: ignore[arg-type]
    assert not is_admissible(window, outstanding=outstanding + free + 1, **state)  # type: ignore[arg-type]


def test_staleness_zero_with_everything_accepted_is_exactly_on_policy() -> None:
    window = Window(max_staleness=0, groups_per_step=16, min_acceptance=0.1)
    assert free_groups(window, outstanding=0, ready=0, unpublished=0, acceptance=1.0) == 16
    assert free_groups(window, outstanding=10, ready=6, unpublished=0, acceptance=1.0) == 0
    assert free_groups(window, outstanding=0, ready=0, unpublished=16, acceptance=1.0) == 0


def test_half_acceptance_allows_twice_the_groups_and_the_floor_bounds_it() -> None:
    window = Window(max_staleness=1, groups_per_step=4, min_acceptance=0.25)
    assert free_groups(window, outstanding=0, ready=0, unpublished=0, acceptance=0.5) == 16
    assert free_groups(window, outstanding=0, ready=0, unpublished=0, acceptance=0.01) == 32


def test_rounding_of_the_average_costs_no_group() -> None:
    window = Window(max_staleness=0, groups_per_step=3, min_acceptance=0.1)
    assert free_groups(window, outstanding=0, ready=0, unpublished=0, acceptance=0.1 + 0.2) == 10


@given(averages, st.lists(st.booleans(), max_size=200), st.integers(1, 512))
def test_the_average_stays_a_share(average: float, survived: list[bool], groups_per_step: int) -> None:
    window = Window(max_staleness=0, groups_per_step=groups_per_step, min_acceptance=0.1)
    for fate in survived:
        average = next_acceptance(average, survived=fate, smoothing=window.smoothing)
        assert 0.0 <= average <= 1.0


@given(windows, counts, counts, counts, averages, st.integers(0, 16))
def test_a_node_behind_has_the_window_of_a_smaller_staleness(
    window: Window, outstanding: int, ready: int, unpublished: int, acceptance: float, lag: int
) -> None:
    shorter = Window(
        max_staleness=window.max_staleness - lag,
        groups_per_step=window.groups_per_step,
        min_acceptance=window.min_acceptance,
    )
    state = {"outstanding": outstanding, "ready": ready, "unpublished": unpublished}
    assert free_groups(window, acceptance=acceptance, lag=lag, **state) == free_groups(
        shorter, acceptance=acceptance, **state
    )
