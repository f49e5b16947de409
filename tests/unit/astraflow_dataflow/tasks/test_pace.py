"""Little work goes where it ends soonest."""

import heapq

import pytest

from astraflow_dataflow.records import Pace
from astraflow_dataflow.tasks.pace import most_held, straggles_after_s

FAST = Pace(node_id="fast", slots=8, task_s=10)
SLOW = Pace(node_id="slow", slots=8, task_s=40)


@pytest.mark.parametrize(
    ("work", "held"),
    [
        (4, {"slow": 0}),  # all end after 10 s
        (16, {"slow": 0}),  # two rounds of the fast node, 20 s; with the slow one it would be 40
        (28, {"slow": 4}),  # 24 in three rounds of the fast node; the rest ends after 40 s on either
        (32, {}),  # 24 there and 8 here, all after 40 s
        (1000, {}),
    ],
)
def test_a_slow_node_holds_less_the_less_is_left(work: int, held: dict[str, int]) -> None:
    assert most_held([FAST, SLOW], work=work) == held


def test_a_node_alone_or_among_its_like_may_hold_what_it_can() -> None:
    assert most_held([SLOW], work=8) == {}
    assert most_held([SLOW, Pace(node_id="other", slots=8, task_s=27)], work=4) == {}
    assert most_held([SLOW, Pace(node_id="other", slots=8, task_s=26)], work=4) == {"slow": 0}
    assert most_held([SLOW, Pace(node_id="full", slots=0, task_s=1)], work=8) == {}
    assert most_held([], work=8) == {}


def test_a_few_seconds_make_no_node_slow() -> None:
    quick = Pace(node_id="quick", slots=8, task_s=0.01)
    assert most_held([quick, Pace(node_id="other", slots=8, task_s=5)], work=4) == {}
    assert most_held([quick, Pace(node_id="other", slots=8, task_s=5.1)], work=4) == {"other": 0}


def makespan(work: int, *, bounds: dict[str, int]) -> float:
    """When the last of these tasks ends, if each node takes one whenever it may."""
    slots = [
        pace for pace in (FAST, SLOW) for _ in range(min(pace.slots, bounds.get(pace.node_id, pace.slots)))
    ]
    free = [(0.0, index) for index in range(len(slots))]
    ends = []
    for _ in range(work):
        start, index = heapq.heappop(free)
        ends.append(start + slots[index].task_s)
        heapq.heappush(free, (ends[-1], index))
    return max(ends)


def test_a_step_of_sixteen_ends_in_half_the_time() -> None:
    assert makespan(16, bounds={}) == 40
    assert makespan(16, bounds=most_held([FAST, SLOW], work=16)) == 20


def test_a_straggler_takes_longer_than_that_quantile_of_the_tasks_before_it() -> None:
    took_s = [float(second) for second in range(100, 0, -1)]
    assert straggles_after_s(took_s, quantile=0.95) == 95.0
    assert straggles_after_s(took_s, quantile=0.5) == 50.0
    assert straggles_after_s([3.0] * 20, quantile=0.99) == 3.0


def test_of_few_tasks_nobody_knows_which_straggles() -> None:
    assert straggles_after_s([1.0] * 19, quantile=0.5) == 0.0
