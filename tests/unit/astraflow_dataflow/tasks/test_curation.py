"""Drawing tasks from a data set."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.errors import PluginError
from astraflow.plugins import Message, TaskSpec
from astraflow.rollout.v1 import task_pb2
from astraflow_dataflow.records import Supply
from astraflow_dataflow.rules.faults import PluginFault, PluginFaults
from astraflow_dataflow.runs.data_plugins import DataPlugin
from astraflow_dataflow.runs.drawing import draw, training_tasks
from astraflow_dataflow.tasks.curation import missing_tasks, new_task, propose

Source = Callable[[int], TaskSpec | None]
Answer = Callable[[Sequence[TaskSpec]], object]


def source(length: int) -> Source:
    """A data set of that many tasks."""
    return lambda index: TaskSpec(task_id=f"t{index}", messages=()) if index < length else None


def drawn(dataset: Source, *, start: int, count: int) -> tuple[list[str], bool]:
    """Ids of what is drawn, and whether the data set ended."""
    specs, ended = draw(dataset, start=start, count=count)
    return [spec.task_id for spec in specs], ended


@given(st.integers(0, 50), st.integers(0, 60), st.integers(1, 20))
def test_drawing_stops_at_the_end_and_skips_nothing(length: int, start: int, count: int) -> None:
    wanted = [f"t{index}" for index in range(start, min(length, start + count))]
    assert drawn(source(length), start=start, count=count) == (wanted, start + count > length)


@dataclass
class Sized:
    """A data set that says how many tasks it has, and does not enforce it."""

    length: Callable[[], int]

    def __len__(self) -> int:
        return self.length()

    def train(self, index: int) -> TaskSpec | None:
        return TaskSpec(f"t{index}", ())


def test_drawing_ends_where_the_data_set_says_it_does() -> None:
    assert drawn(training_tasks(Sized(lambda: 3)), start=1, count=4) == (["t1", "t2"], True)  # type: ignore[arg-type]
    unreadable = training_tasks(Sized(Mock(side_effect=OSError("no index file"))))  # type: ignore[arg-type]
    with pytest.raises(PluginError, match=r"Sized.train raised at index 0: OSError: no index file"):
        draw(unreadable, start=0, count=1)


DRAWN = [TaskSpec(f"t{n}", (), source="ab"[n % 2]) for n in range(4)]


def proposed(answer: Answer) -> tuple[list[str], list[PluginFault]]:
    """Ids of the tasks that are left of DRAWN, and the faults."""
    faults = PluginFaults()
    curator = DataPlugin(kind="curator", name="m:Curator", made=SimpleNamespace(propose=answer))
    left = propose(curator, DRAWN, faults)  # type: ignore[arg-type]
    return [task.task_id for task in left], faults.all()


def test_a_curator_skips_and_orders_what_was_drawn() -> None:
    left, faults = proposed(lambda tasks: [task for task in reversed(tasks) if task.source == "a"])
    assert (left, faults) == (["t2", "t0"], [])
    assert proposed(lambda tasks: ()) == ([], [])


def raises(tasks: Sequence[TaskSpec]) -> object:
    """No answer."""
    raise ZeroDivisionError("of nothing")


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (raises, r"ZeroDivisionError: of nothing \(test_curation.py:\d+ in raises\)"),
        (lambda tasks: None, "`propose` returned NoneType"),
        (lambda tasks: ["t0"], "`propose` returned list, not a sequence of tasks"),
        (lambda tasks: [tasks[0], tasks[0]], "not drawn, or one twice"),
        (lambda tasks: [TaskSpec("t9", ())], r"not drawn, or one twice: \['t9'\]"),
    ],
)
def test_a_curator_that_fails_is_named_and_the_tasks_stay_as_drawn(answer: Answer, problem: str) -> None:
    left, (fault,) = proposed(answer)
    assert left == ["t0", "t1", "t2", "t3"]
    assert (fault.kind, fault.name) == ("curator", "m:Curator")
    assert re.search(problem, fault.problem), fault.problem


def test_tasks_before_the_fault_are_good_work_and_the_next_draw_meets_it() -> None:
    def broken(index: int) -> TaskSpec | None:
        return {0: TaskSpec("t0", ()), 1: TaskSpec("t1", ())}[index]

    assert drawn(broken, start=0, count=8) == (["t0", "t1"], False)
    with pytest.raises(PluginError, match=r"broken raised at index 2: KeyError.*mend it"):
        draw(broken, start=2, count=6)


NEEDED = Supply(cursor=0, exhausted=False, active=True, queued=0, credit=5)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, 5), ({"queued": 3}, 2), ({"queued": 9}, 0), ({"exhausted": True}, 0), ({"active": False}, 0)],
)
def test_only_missing_tasks_are_drawn(changes: dict[str, Any], expected: int) -> None:
    assert missing_tasks(replace(NEEDED, **changes)) == expected


def test_a_task_keeps_its_messages_data_and_group_size() -> None:
    spec = TaskSpec(task_id="t", messages=(Message(role="user", content="hi"),), data={"gold": [1, 2]})
    task = new_task(spec, purpose=task_pb2.PURPOSE_TRAINING, group_size=8)
    assert (task.task_id, task.messages[0].content, task.group_size) == ("t", "hi", 8)
    assert task.data_json == b'{"gold":[1,2]}'


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        (TaskSpec(task_id="t", messages=(), data={"a": object()}), "not JSON"),
        (TaskSpec(task_id="a b", messages=()), "cannot be used"),
        (TaskSpec(task_id="eval:x", messages=()), "cannot be used"),
    ],
)
def test_a_task_that_breaks_the_contract_is_the_data_sets_fault(spec: TaskSpec, word: str) -> None:
    with pytest.raises(PluginError, match=word):
        new_task(spec, purpose=task_pb2.PURPOSE_TRAINING, group_size=8)


def test_rows_are_no_tasks() -> None:
    def rows(index: int) -> Any:
        return {"prompt": "2 + 2", "answer": 4}

    with pytest.raises(PluginError, match="at index 0: TypeError: it returned dict, not a TaskSpec or None"):
        draw(rows, start=0, count=2)
