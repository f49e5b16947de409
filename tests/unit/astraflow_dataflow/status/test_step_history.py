"""Steps as aligned columns, thinned to what a chart shows."""

import math
from typing import cast

import numpy as np
import pytest
from structlog.testing import capture_logs

from astraflow.dataflow.v1 import admin_service_pb2 as pb
from astraflow_dataflow.records import StepFigures
from astraflow_dataflow.status import step_history
from astraflow_dataflow.status.step_history import MAX_SERIES, Columns, StepHistory, thinned
from astraflow_dataflow.store.admin import AdminStore


def step(number: int, counts: str = "", **figures: float) -> StepFigures:
    return StepFigures(
        step=number,
        finish_ms=number * 1000,
        names=tuple(figures),
        values=np.array(list(figures.values()), "<f4").tobytes(),
        counts=counts,
    )


def series(response: pb.ListStepsResponse) -> dict[str, list[float]]:
    return {each.name: list(each.mean) for each in response.series}


def test_figures_that_only_some_steps_have_stay_aligned() -> None:
    columns = (
        Columns()
        .appended([step(1, reward=0.5), step(2, reward=0.25, kl=3.0)])
        .appended([step(3, kl=4.0, counts="ready 7\ndropped.stale 2")])
    )
    found = thinned(columns, pb.ListStepsRequest())
    assert list(found.steps) == [1, 2, 3]
    expected = {
        "data.dropped.stale": [math.nan, math.nan, 2.0],
        "data.ready": [math.nan, math.nan, 7.0],
        "kl": [math.nan, 3.0, 4.0],
        "reward": [0.5, 0.25, math.nan],
    }
    assert list(series(found)) == list(expected)
    for name, values in series(found).items():
        assert values == pytest.approx(expected[name], nan_ok=True), name
    assert not found.series[0].min


def test_a_long_run_is_thinned_to_means_with_their_extremes() -> None:
    columns = Columns().appended([step(number, reward=float(number % 10)) for number in range(1, 100_001)])
    found = thinned(columns, pb.ListStepsRequest(max_points=1000))
    assert (found.total, len(found.steps), found.steps[0], found.steps[-1]) == (100_000, 1000, 100, 100_000)
    (reward,) = found.series
    assert set(reward.mean) == {4.5}
    assert (set(reward.min), set(reward.max)) == ({0.0}, {9.0})


@pytest.mark.parametrize(
    ("first", "last", "points", "steps"),
    [
        (0, 0, 3, [4, 8, 10]),
        (9, 0, 3, [9, 10]),
        (2, 5, 2, [3, 5]),
        (11, 0, 3, []),
        (0, 1, 1, [1]),
        (0, 0, 1, [10]),
    ],
)
def test_a_part_of_the_steps(first: int, last: int, points: int, steps: list[int]) -> None:
    columns = Columns().appended([step(number, reward=1.0) for number in range(1, 11)])
    asked = pb.ListStepsRequest(min_step=first, max_step=last, max_points=points)
    assert list(thinned(columns, asked).steps) == steps


def test_only_the_series_asked_for_and_none_of_a_run_without_steps() -> None:
    columns = Columns()
    assert thinned(columns, pb.ListStepsRequest()).total == 0
    columns = columns.appended([step(1, reward=1.0, kl=2.0)])
    assert series(thinned(columns, pb.ListStepsRequest(names=["kl", "unknown"]))) == {"kl": [2.0]}


def test_a_point_without_any_figure_is_no_number() -> None:
    columns = Columns().appended(
        [step(1, reward=1.0), step(2), step(3), step(4, reward=2.0), step(5), step(6)]
    )
    (reward,) = thinned(columns, pb.ListStepsRequest(max_points=3)).series
    assert list(reward.mean) == pytest.approx([1.0, 2.0, math.nan], nan_ok=True)
    assert list(reward.max) == pytest.approx([1.0, 2.0, math.nan], nan_ok=True)


def fresh(first: int, count: int) -> list[StepFigures]:
    """Steps of which each brings names that no step had before."""
    return [
        step(number, "ready 7", **{f"fresh_{number}_{index}": 1.0 for index in range(256)})
        for number in range(first, first + count)
    ]


def test_names_that_every_step_brings_anew_take_no_more_room_than_the_first_of_them() -> None:
    columns = Columns().appended(fresh(1, 3))
    before = columns.num_bytes
    columns = columns.appended(fresh(4, 1000)).appended([step(1004, fresh_1_0=2.0)])
    assert (len(columns.names), columns.left_out) == (MAX_SERIES, "fresh_2_255")
    assert columns.num_bytes - before < 1001 * 32, "a name costs nothing where no step has it"
    kept = series(thinned(columns, pb.ListStepsRequest(names=["fresh_1_0", "fresh_9_0"], min_step=1004)))
    assert kept == {"fresh_1_0": [2.0]}
    assert set(series(thinned(columns, pb.ListStepsRequest()))["data.ready"][:10]) == {7.0}


def test_a_history_that_is_continued_leaves_what_was_read_of_it_alone() -> None:
    read = Columns().appended([step(1, reward=1.0)])
    continued = read.appended([step(2, reward=2.0, kl=1.0)])
    assert series(thinned(read, pb.ListStepsRequest())) == {"reward": [1.0]}
    assert series(thinned(continued, pb.ListStepsRequest(names=["reward"]))) == {"reward": [1.0, 2.0]}


class Steps:
    """A store that holds these steps."""

    def __init__(self, held: list[StepFigures]) -> None:
        self._held = held

    async def num_steps(self, run_id: str, policy_id: str) -> tuple[int, int]:
        return self._held[0].step, self._held[-1].step

    async def steps(self, run_id: str, policy_id: str, *, after: int, limit: int) -> list[StepFigures]:
        return [item for item in self._held if item.step > after][:limit]


async def test_the_name_that_found_no_room_is_said_once() -> None:
    held = fresh(1, 3)
    history = StepHistory(cast("AdminStore", Steps(held)))
    with capture_logs() as lines:
        await history.of("run", "solver")
        held += fresh(4, 3)
        await history.of("run", "solver")
    (line,) = lines
    assert (line["first_left_out"], line["kept"]) == ("fresh_2_255", MAX_SERIES)


async def test_what_is_held_of_many_policies_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    history = StepHistory(cast("AdminStore", Steps(fresh(1, 2))))
    monkeypatch.setattr(step_history, "_MAX_HELD_BYTES", 3 * (await history.of("run", "p0")).num_bytes)
    for number in range(1, 10):
        await history.of("run", f"p{number}")
    assert [policy_id for _, policy_id in history._held] == ["p7", "p8", "p9"]


class Deleted:
    """A store whose steps go between being counted and being read."""

    def __init__(self) -> None:
        self.num_reads = 0

    async def num_steps(self, run_id: str, policy_id: str) -> tuple[int, int]:
        return 1, 2500

    async def steps(self, run_id: str, policy_id: str, *, after: int, limit: int) -> list[StepFigures]:
        self.num_reads += 1
        assert self.num_reads <= 2, "it reads on and on"
        return [step(number) for number in range(1, limit + 1)] if after == 0 else []


async def test_reading_ends_when_the_run_is_deleted_meanwhile() -> None:
    store = Deleted()
    columns = await StepHistory(cast("AdminStore", store)).of("run", "solver")
    assert (columns.last, store.num_reads) == (1000, 2)
