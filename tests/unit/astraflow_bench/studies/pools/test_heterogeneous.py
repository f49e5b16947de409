"""`heterogeneous`: when pools come and go, what they did while they were there, what they cost; figures by hand."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from astraflow_bench.studies.pools.heterogeneous import (
    HETEROGENEOUS,
    HOMOGENEOUS,
    MOVES,
    conclude,
    measure,
    moves,
)
from astraflow_bench.studies.study import Run
from support.study_results import result


def event(name: str, second: float, log: str, **fields: object) -> dict[str, Any]:
    return {"event": name, "timestamp": datetime.fromtimestamp(second, UTC).isoformat(), "log": log, **fields}


FAR = "node-far-60"
EVENTS = [
    event("run.started", 1000, "launcher"),
    event("pool.joined", 1000, "node-pools", pool="local"),
    event("pool.joined", 1100, "node-pools", pool="far-60"),
    event("pool.left", 1500, "node-pools", pool="far-60"),
    *(event("timed.call", second, "node-local") for second in (1010, 1100)),
    *(event("timed.call", second, FAR) for second in (1110, 1200, 1210, 1490)),
    *(
        event("weights.fetched", 1105 + number, FAR, seconds=seconds)
        for number, seconds in enumerate((9, 2, 4))
    ),
    event("weights.activated", 1107, FAR, seconds=4.0),
]
STEPS = [
    {
        "kind": "step", "policy": "solver", "step": number, "seconds": 100.0 * number, "wait_s": 1.0 * number,
        "train_s": 90.0, "staleness_mean": 1.0,
    }
    for number in range(1, 9)
]  # fmt: skip


def test_pools_are_measured_while_they_are_there() -> None:
    account = {"ingested": 110, "evaluated": 10, "dropped": {"stale": 5}}
    summary = {"trajectories": account, "restarts": {}, "heldout_last": 0.25}
    figures = measure(Run(summary=summary, metrics=STEPS, events=EVENTS)).figures
    assert (figures["wait_s"], figures["longest_wait_s"], figures["stale"]) == (5.5, 8.0, 0.05)
    assert figures["far-60_answers"] == pytest.approx(4 / 4), "steps that ended from 1100 to before 1500"
    assert (figures["far-60_transfer_s"], figures["far-60_join_s"]) == (3.0, pytest.approx(10.0))
    assert figures["far-60_swap_share"] == pytest.approx(4 / 400)
    assert figures["local_transfer_s"] is None
    assert figures["far-30_answers"] is None


def test_the_other_pools_join_and_leave_even_in_a_short_run() -> None:
    assert [(move.step, move.pool.name) for move in moves(MOVES[HOMOGENEOUS], 60)] == [
        (0, "even-1"),
        (0, "even-2"),
        (0, "even-3"),
    ]
    planned = [(move.step, move.pool.name, move.joins) for move in moves(MOVES[HETEROGENEOUS], 20)]
    assert planned == [
        (0, "local", True),
        (1, "far-60", True),
        (2, "far-30", True),
        (10, "far-60", False),
        (13, "far-60", True),
        (16, "far-30", False),
    ]


def test_a_longer_wait_is_a_share_of_a_step() -> None:
    results = [
        result(arm, seed, wait_s=wait_s, step_s=4.0, heldout=heldout)
        for seed in range(3)
        for arm, wait_s, heldout in ((HOMOGENEOUS, 0.1, 0.5), (HETEROGENEOUS, 0.14, 0.4))
    ]
    wait, gap = conclude(results)
    assert (wait.value, wait.met) == (pytest.approx(0.01), True)
    assert gap.value == pytest.approx(-0.1)
    assert conclude(results[:1]) == []
