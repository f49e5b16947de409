"""Asking a selector which groups a step takes."""

import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest

from astraflow.dataflow.v1 import batch_pb2
from astraflow.plugins import ReadyGroup, StepRequest
from astraflow_dataflow.batches.selecting import choose, ready_group
from astraflow_dataflow.records import Selection
from astraflow_dataflow.rules.faults import PluginFault, PluginFaults
from astraflow_dataflow.runs.data_plugins import DataPlugin

REQUEST = StepRequest(policy="p", step=1, base_version=3, num_groups=2, max_staleness=1, num_outstanding=0)
Answer = Callable[[Sequence[ReadyGroup], StepRequest], object]


def stored(group_id: str, *, version: int, arrival: int, reward: float = 1.0) -> tuple[str, float, bytes]:
    """A ready group as Redis offers it."""
    versions = {"min_version": version, "max_version": version + 1}
    item = batch_pb2.BatchItem(trajectory_id="x", task_id="t", source="gsm8k", reward=reward, **versions)
    items = batch_pb2.Batch(items=[item, item]).SerializeToString()
    return group_id, float(version * 2**32 + arrival), items


READY = [ready_group(*stored(f"g{n}", version=2, arrival=n + 7)) for n in range(3)]


def chosen(answer: Answer) -> tuple[Selection | None, list[PluginFault]]:
    """What becomes of an answer, and the faults."""
    faults = PluginFaults()
    selector = DataPlugin(kind="selector", name="m:Selector", made=SimpleNamespace(select=answer))
    return choose(selector, READY, REQUEST, faults), faults.all()  # type: ignore[arg-type]


def test_a_candidate_tells_what_its_group_holds() -> None:
    group = ready_group(*stored("g", version=5, arrival=12, reward=0.5))
    assert (group.group_id, group.task_id, group.source, group.arrival) == ("g", "t", "gsm8k", 12)
    assert (group.oldest_version, group.newest_version, group.rewards) == (5, 6, [0.5, 0.5])


def test_a_selector_chooses_in_order_or_waits() -> None:
    taken = Selection(mode="take", chosen=("g2", "g0"))
    assert chosen(lambda groups, request: [groups[2].group_id, groups[0].group_id]) == (taken, [])
    assert chosen(lambda groups, request: []) == (Selection(mode="wait"), [])


def raises(groups: Sequence[ReadyGroup], request: StepRequest) -> object:
    """No answer."""
    raise KeyError("priority")


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (raises, r"KeyError: 'priority' \(test_selecting.py:\d+ in raises\)"),
        (lambda groups, request: ["g0", "g9"], "it chose 'g9', which is no candidate"),
        (lambda groups, request: ["g0", "g0"], "it chose 1 groups twice"),
        (lambda groups, request: ["g0"], "it chose 1 groups, the step takes 2"),
        (lambda groups, request: None, "it returned NoneType, not a sequence of group ids"),
        (lambda groups, request: "g0", "it returned str"),
        (lambda groups, request: list(groups[:2]), "which is no candidate"),
    ],
)
def test_a_selector_that_fails_is_named_and_chooses_nothing(answer: Answer, problem: str) -> None:
    selection, (fault,) = chosen(answer)
    assert selection is None
    assert (fault.kind, fault.name) == ("selector", "m:Selector")
    assert re.search(problem, fault.problem), fault.problem
