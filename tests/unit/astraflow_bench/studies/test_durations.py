"""The imposed trace is fixed, has the tail that it says, and its bound is that of slots and trainer."""

from statistics import median, quantiles

import pytest

from astraflow_bench.studies.durations import LONGEST, Lognormal, Recorded, ideal_step_s


def test_a_trace_is_a_function_of_seed_and_call() -> None:
    one, same, other = Lognormal(tail=4, seed=0), Lognormal(tail=4, seed=0), Lognormal(tail=4, seed=1)
    calls = [f"train-{task}/0/solver/0" for task in range(20)]
    assert [one.of(call) for call in calls] == [same.of(call) for call in reversed(calls)][::-1]
    assert [one.of(call) for call in calls] != [other.of(call) for call in calls]


@pytest.mark.parametrize("tail", [4, 6, 8, 10])
def test_the_99th_percentile_is_the_tail_in_medians(tail: int) -> None:
    drawn = [Lognormal(tail=tail, seed=0).of(str(call)) for call in range(20_000)]
    assert median(drawn) == pytest.approx(1, rel=0.03)
    assert quantiles(drawn, n=100)[-1] == pytest.approx(tail, rel=0.06)
    assert max(drawn) <= LONGEST


def test_without_a_tail_all_calls_take_as_long() -> None:
    assert {Lognormal(tail=1, seed=0).of(str(call)) for call in range(9)} == {1.0}


def test_recorded_lengths_are_in_units_of_their_median() -> None:
    trace = Recorded([100, 200, 800], seed=0)
    assert {trace.of(str(call)) for call in range(50)} == {0.5, 1.0, 4.0}


@pytest.mark.parametrize("lengths", [[], [3, 0], [3, -1], [3, float("nan")]])
def test_lengths_are_positive(lengths: list[float]) -> None:
    with pytest.raises(ValueError, match="positive numbers, at least one"):
        Recorded(lengths, seed=0)


def test_a_tail_below_one_is_none() -> None:
    with pytest.raises(ValueError, match=r"tail is 0.5, .* give 1 or more"):
        Lognormal(tail=0.5, seed=0)


@pytest.mark.parametrize(
    ("call_s", "slots", "train_s", "bound_s"),
    [
        # Eight calls of 2 s in four slots: two rounds.
        (16.0, 4, 1.0, 4.0),
        # The trainer is what is short.
        (16.0, 4, 5.0, 5.0),
        (16.0, 16, 1.0, 1.0),
    ],
)
def test_the_bound_is_what_is_short(call_s: float, slots: int, train_s: float, bound_s: float) -> None:
    assert ideal_step_s(call_s=call_s, slots=slots, train_s=train_s) == bound_s
