"""Which failures are alike, and which stop a run."""

import pytest

from astraflow_dataflow.rules.failures import TaskFailures, kind_of, why_stopped

PLACE = "(recipe.py:12 in __call__)"


@pytest.mark.parametrize(
    ("first", "second", "alike"),
    [
        (f"member 0: KeyError: 'a' {PLACE}", f"member 3: KeyError: 'b' {PLACE} (and 2 more members)", True),
        (f"ValueError: not a number: (1) {PLACE}", f"ValueError: not a number: (2, {PLACE}", True),
        (f"KeyError: 'a' {PLACE}", f"IndexError: 'a' {PLACE}", False),
        (f"KeyError: 'a' {PLACE}", "KeyError: 'a' (recipe.py:13 in __call__)", False),
        ("task t-1: the reward took 5.2 s", "task t-1: the reward took 7 s", False),
        ("task t-1: the reward took 5 s", "task t-1: the reward took 7 s", True),
    ],
)
def test_failures_of_one_exception_at_one_place_are_alike(first: str, second: str, *, alike: bool) -> None:
    kinds = {kind_of("reward_error", text, task_id="t-1") for text in (first, second)}
    assert (len(kinds) == 1) is alike


def test_a_kind_is_one_short_line() -> None:
    kind = kind_of("reward_error", "line\nafter line " * 500, task_id="t-1")
    assert len(kind) == 200
    assert "\n" not in kind


def failures(**values: object) -> TaskFailures:
    """Twenty failures in a row."""
    told = {"reason": "reward_error", "detail": f"KeyError: 'a' {PLACE}", "task_id": "t-1", "node_id": "n1"}
    return TaskFailures(**{"count": 20, "in_a_row": 20, "first_ms": 1, "last_ms": 2, **told, **values})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "most", "stops"),
    [
        (failures(), 20, True),
        (failures(), 21, False),
        (failures(), 0, False),
        (failures(in_a_row=3), 20, False),
        (failures(reason="engine_error"), 20, False),
    ],
)
def test_a_run_is_stopped_by_what_its_recipe_does_alone(
    found: TaskFailures, most: int, *, stops: bool
) -> None:
    assert bool(why_stopped([found], most_in_a_row=most)) is stops


def test_the_reason_names_the_first_failure_the_setting_and_the_remedy() -> None:
    reason = why_stopped([failures()], most_in_a_row=20)
    for word in ("20 times in a row", "max_identical_failures", PLACE, "task t-1 on n1", "start a new run"):
        assert word in reason
