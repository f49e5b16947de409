"""`autoscaling`: node-hours by the lives of processes, and the fixed pool that is compared with; figures by hand."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from astraflow_bench.studies.pools.autoscaling import AUTO, conclude, measure, nodes_needed
from astraflow_bench.studies.study import Result, Run
from support.study_results import evaluations, result


def event(name: str, second: float, **fields: object) -> dict[str, Any]:
    return {
        "event": name,
        "timestamp": datetime.fromtimestamp(second, UTC).isoformat(),
        "log": "launcher",
        **fields,
    }


EVENTS = [
    event("run.started", 1000),
    event("child.started", 1001, child="redis"),
    event("child.started", 1010, child="node-local-1"),
    event("child.started", 1150, child="node-local-2"),
    event("child.ended", 1250, child="node-local-2"),
    event("child.started", 1280, child="node-local-2"),
]
STEPS = [
    {
        "kind": "step", "policy": "solver", "step": number, "seconds": 100.0 * number - 200, "wait_s": 25.0,
        "train_s": 75.0, "staleness_mean": 1.0,
    }
    for number in range(1, 6)
]  # fmt: skip


def test_node_hours_are_the_lives_of_nodes_from_the_third_step_to_the_last() -> None:
    scaled = {"grown": 2, "shrunk": 1, "turns": 2}
    metrics = [*STEPS, *evaluations((5, 0.4))]
    summary = {"autoscaling": scaled, "heldout_last": 0.4}
    measured = measure(Run(summary=summary, metrics=metrics, events=EVENTS))
    # From 1100 to 1300: one for 200 s, the other from 1150 to 1250 and from 1280 on.
    assert measured.figures["node_hours"] == pytest.approx((200 + 100 + 20) / 3600)
    assert measured.figures["hours"] == pytest.approx(200 / 3600)
    assert measured.figures["nodes"] == pytest.approx(1.6)
    assert (measured.figures["wait"], measured.figures["changes"]) == (0.25, 3)
    assert measured.curves["nodes"][2:] == [(3, 1.0), (4, 2.0)]


def cell(arm: str, seed: int, node_hours: float, hours: float, heldout: float = 0.5) -> Result:
    return result(arm, seed, node_hours=node_hours, hours=hours, heldout=heldout, turns=2)


def test_the_best_fixed_pool_is_the_cheapest_that_takes_as_long() -> None:
    results = [
        one
        for seed in range(2)
        for one in (
            cell(AUTO, seed, 8.0, 1.0, 0.5),
            cell("fixed-2", seed, 5.0, 1.6),
            cell("fixed-3", seed, 10.0, 1.04, 0.4),
            cell("fixed-4", seed, 16.0, 1.0),
        )
    ]
    ratio, gap, turns = conclude(results)
    assert (ratio.subject, ratio.value, ratio.met) == ("fixed-3", 0.8, True)
    assert gap.value == pytest.approx(0.1)
    assert (turns.value, turns.met) == (2, True)
    assert conclude(results[:1]) == []


def test_the_trace_asks_for_the_nodes_that_the_page_names() -> None:
    assert [nodes_needed(length) for length in (1.0, 2.0, 0.5)] == [1.7, 3.4, 0.85]
