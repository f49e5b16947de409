"""A window is what was read between its ends, begins when the nodes are there, and ends when it says something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from astraflow.dataflow.v1.admin_service_pb2 import NodeStatus
from astraflow.recipe.dataflow import AutoscalingSettings, PoolBounds
from astraflow_dataflow.records import Life
from astraflow_dataflow.status.autoscaling import (
    AutoscalingState,
    FleetReading,
    PolicyReading,
    advance,
    autoscaling_message,
    begun,
    reading,
)
from support.dataflow_snapshots import AUDIT, POLICY, node

SETTINGS = AutoscalingSettings(
    pools={"eu": PoolBounds(min_nodes=1, max_nodes=2), "us": PoolBounds(min_nodes=0, max_nodes=6)},
    window_s=10,
    window_steps=2,
    start_s=30,
)


def read(
    second: float, *, nodes: int = 1, busy: float = 1.0, waited_s: float = 0.0, steps: int = 0, stale: int = 0
) -> FleetReading:
    """The run at a second, as everything came to so far."""
    policy = PolicyReading(waited_ms=int(1000 * waited_s), steps=steps, bound=4 * steps, staleness=stale)
    return FleetReading(now_ms=int(1000 * second), nodes=nodes, busy=busy, policies={"solver": policy})


def after(readings: Sequence[FleetReading]) -> AutoscalingState:
    """The state after all of them."""
    state = begun(readings[0], settings=SETTINGS)
    for one in readings[1:]:
        state = advance(state, one, settings=SETTINGS)
    return state


BEGUN = [read(0), read(1), read(2, steps=1)]
"""The node is there, and the step under way has ended: the window begins."""


def test_a_window_is_what_passed_between_its_ends() -> None:
    state = after([*BEGUN, read(7, waited_s=1, steps=1), read(12, waited_s=4, steps=3, stale=2, busy=0.8)])
    assert state.decided is not None
    assert state.decided.wait_share == pytest.approx(0.4)
    assert state.decided.busy_share == pytest.approx(0.9)
    assert (state.decided.nodes, state.decided.staleness_share) == (1, 0.25)
    assert (state.target.nodes, state.first) == (2, None), "it grew, and the next window waits for the node"


def test_a_window_begins_with_the_end_of_a_step_of_its_nodes_or_when_that_is_long_overdue() -> None:
    assert after([read(0), read(1), read(10, waited_s=9)]).first is None, (
        "batches that nobody had sampled yet"
    )
    waiting = after([*BEGUN, read(12, waited_s=5, steps=3), read(20, waited_s=14, steps=4)])
    assert (waiting.first, waiting.there) == (None, None), "one of two nodes is there"
    there = advance(waiting, read(21, nodes=2, steps=4), settings=SETTINGS)
    assert there.first is None
    for later in (read(24, nodes=2, steps=5), read(51, nodes=2, steps=4)):
        assert advance(there, later, settings=SETTINGS).first == later
    none = SETTINGS.model_copy(update={"pools": {"eu": PoolBounds(min_nodes=0, max_nodes=2)}})
    nothing = advance(begun(read(0, nodes=0), settings=none), read(1, nodes=0), settings=none)
    assert nothing.first == read(1, nodes=0), "without a node no step ends"
    late = advance(waiting, read(42, steps=4), settings=SETTINGS)
    assert advance(late, read(43, steps=5), settings=SETTINGS).first == read(43, steps=5)


def test_a_window_without_steps_goes_on_unless_the_trainer_does_nothing_but_wait() -> None:
    slow = [*BEGUN, read(13, waited_s=1, steps=2)]
    assert after(slow).decided is None
    assert after([*slow, read(17, waited_s=1, steps=3)]).decided is not None
    assert after([*BEGUN, read(13, waited_s=11, steps=1)]).target.nodes == 2


def test_a_window_ends_once_a_trainer_has_waited_too_much_for_all_of_it() -> None:
    assert after([*BEGUN, read(6, waited_s=0.9, steps=2)]).decided is None
    assert after([*BEGUN, read(6, waited_s=1.5, steps=2)]).target.nodes == 2
    long = [*BEGUN, read(12, waited_s=1.5, steps=2)]
    assert after(long).decided is None, (
        "by its first step it will take 20 s, and 1.5 s of them are within the band"
    )


def test_nothing_is_measured_without_a_trainer() -> None:
    nobody = FleetReading(now_ms=50_000, nodes=1, busy=1.0, policies={})
    assert after([read(0), nobody]).there is None
    assert after([*BEGUN, nobody]).first is None


def test_a_reading_counts_nodes_at_work_in_the_pools_and_policies_with_a_trainer() -> None:
    nodes = [
        node(pool="eu", max_concurrent_tasks=4, leases=3),
        node(pool="us", max_concurrent_tasks=4, leases=0),
        node(pool="us", max_concurrent_tasks=4, waiting_for="weights"),
        node(pool="us", max_concurrent_tasks=4, drain_reason="operator"),
        node(pool="us", max_concurrent_tasks=4, connected=False),
        node(pool="other", max_concurrent_tasks=4),
    ]
    waiting = replace(POLICY, wait="ready_groups", wait_since_ms=400, wait_until_ms=900, waited_ms=100)
    policies = (
        replace(waiting, staleness={0: 2, 1: 1}, finished_step=7),
        replace(POLICY, policy_id="judge", frozen=True),
        replace(POLICY, policy_id="gone", heard_ms=0),
    )
    found = reading(replace(AUDIT, queued_tasks=0, policies=policies), nodes, pools=SETTINGS.pools)
    assert (found.nodes, found.busy) == (2, 3 / 8)
    assert found.policies == {"p": PolicyReading(waited_ms=600, steps=7, bound=3, staleness=1.0)}
    assert reading(AUDIT, nodes, pools=SETTINGS.pools).busy == 1.0, "tasks wait for a place"


def test_pools_are_filled_in_their_order_and_a_finished_run_wants_none() -> None:
    grown = after([*BEGUN, read(12, waited_s=5, steps=3)])
    wanted = replace(grown, target=replace(grown.target, nodes=5))
    nodes: list[NodeStatus] = [node(pool="eu"), node(pool="us", connected=False)]
    message = autoscaling_message(wanted, settings=SETTINGS, life=Life.ACTIVE, nodes=nodes)
    assert (message.target_nodes, message.nodes, dict(message.pools)) == (5, 1, {"eu": 2, "us": 3})
    assert (message.grown, message.turns, message.change_time.seconds) == (1, 0, 12)
    over = autoscaling_message(wanted, settings=SETTINGS, life=Life.FINISHED, nodes=nodes)
    assert (over.target_nodes, dict(over.pools)) == (0, {"eu": 0, "us": 0})
