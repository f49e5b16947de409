"""Tasks that will be long are begun first."""

from astraflow.plugins import TaskSpec
from astraflow_dataflow.runs.lengths import Lengths


def test_tasks_of_long_sources_go_first_and_unknown_ones_may_be_as_long() -> None:
    lengths = Lengths()
    tasks = [TaskSpec(name, (), {}, source=name[0]) for name in ("s1", "l1", "s2", "n1", "l2")]
    assert lengths.longest_first(tasks) == tasks
    lengths.note("s", [100, 300])
    lengths.note("l", [1000])
    assert [task.task_id for task in lengths.longest_first(tasks)] == ["l1", "n1", "l2", "s1", "s2"]


def test_the_mean_length_of_a_source_follows_what_comes() -> None:
    lengths = Lengths()
    lengths.note("a", [100])
    lengths.note("b", [150])
    a, b = TaskSpec("a", (), {}, source="a"), TaskSpec("b", (), {}, source="b")
    for _ in range(6):
        assert lengths.longest_first([a, b]) == [b, a]
        lengths.note("a", [200])  # 110, 119, 127.1, 134.39, 140.951, 146.8559, 152.17
    lengths.note("a", [200])
    assert lengths.longest_first([a, b]) == [a, b]
