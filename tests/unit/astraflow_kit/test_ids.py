"""Sortable ids."""

from hypothesis import given
from hypothesis import strategies as st

from astraflow_kit.ids import IdSource
from support.manual_clock import ManualClock


@given(st.lists(st.floats(min_value=-5, max_value=5), max_size=50), st.integers(0, 2**32))
def test_ids_are_unique_and_sorted_whatever_the_wall_clock_does(steps: list[float], seed: int) -> None:
    clock = ManualClock()
    source = IdSource(clock=clock, seed=seed)
    ids = [source.new()]
    for step in steps:
        clock.skew_s += step
        ids.append(source.new())
    assert ids == sorted(set(ids))
    assert all(len(one) == 26 for one in ids)


def test_ids_of_later_milliseconds_sort_later_across_sources() -> None:
    early, late = ManualClock(), ManualClock(now_s=0.002)
    assert IdSource(clock=early, seed=2**31).new() < IdSource(clock=late, seed=1).new()


def test_the_form_is_known() -> None:
    clock = ManualClock(skew_s=0.0)
    assert IdSource(clock=clock, seed=1).new().startswith("0000000000")


def test_a_seed_repeats_and_no_seed_does_not() -> None:
    clock = ManualClock()
    assert IdSource(clock=clock, seed=4).new() == IdSource(clock=clock, seed=4).new()
    assert IdSource(clock=clock).new() != IdSource(clock=clock).new()
