"""Targets follow the load and never flap: rules by table, bounds by search over loads, noise and any input at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.recipe.dataflow import AutoscalingSettings, PoolBounds
from astraflow_dataflow.status.pool_target import NOISE, PoolTarget, PoolWindow, decide

MOST = 40
SETTINGS = AutoscalingSettings(pools={"a": PoolBounds(min_nodes=1, max_nodes=MOST)})
R = SETTINGS.shrink_after_s
STARVED = PoolWindow(nodes=4, wait_share=0.3, busy_share=1.0, staleness_share=0.2)
IDLE = PoolWindow(nodes=4, wait_share=0.0, busy_share=0.3, staleness_share=0.9)
shares = st.floats(min_value=0, max_value=1)
errors = st.tuples(*[st.sampled_from([-NOISE, 0.0, NOISE])] * 3)


@pytest.mark.parametrize(
    ("window", "nodes", "why"),
    [
        (STARVED, 6, "nodes are short"),
        (replace(STARVED, wait_share=1.0), 8, "nodes are short"),
        (replace(STARVED, busy_share=0.5), 4, "more nodes would not help"),
        (replace(STARVED, nodes=1), 4, "nodes are short"),
        (replace(STARVED, wait_share=0.06), 4, "dead band"),
        (IDLE, 2, "nodes are idle"),
        (replace(IDLE, busy_share=0.0), 2, "nodes are idle"),
        (replace(IDLE, busy_share=0.7), 4, "fewer nodes would be too full"),
        (replace(IDLE, staleness_share=0.2), 4, "dead band"),
    ],
)
def test_four_nodes_become(window: PoolWindow, nodes: int, why: str) -> None:
    decided = decide(PoolTarget(nodes=4), window, settings=SETTINGS, now_s=9.0)
    assert decided.nodes == nodes
    assert why in decided.reason


def test_a_pool_of_none_grows_when_there_is_work() -> None:
    none = AutoscalingSettings(pools={"a": PoolBounds(min_nodes=0, max_nodes=2)})
    waiting = PoolWindow(nodes=0, wait_share=1.0, busy_share=1.0, staleness_share=0.0)
    assert decide(PoolTarget(nodes=0), waiting, settings=none, now_s=1.0).nodes == 1


def test_what_has_just_grown_does_not_shrink() -> None:
    grown = decide(PoolTarget(nodes=4), STARVED, settings=SETTINGS, now_s=100.0)
    early = decide(grown, IDLE, settings=SETTINGS, now_s=99.0 + R)
    assert (early.nodes, early.turns) == (grown.nodes, 0)
    assert "added less than 300 s ago" in early.reason
    late = decide(early, IDLE, settings=SETTINGS, now_s=100.0 + R)
    assert (late.nodes, late.turns, late.grown, late.shrunk) == (3, 1, 1, 1)


def test_a_load_between_two_sizes_is_left_alone_ever_longer() -> None:
    target, at_s, turned_s = PoolTarget(nodes=2), 0.0, []
    while at_s < 200 * R:
        at_s += R / 4
        # Two nodes leave a trainer waiting, three have more room than they need.
        short = replace(STARVED, nodes=2, wait_share=0.12)
        window = short if target.nodes == 2 else replace(IDLE, nodes=3, busy_share=0.58)
        after = decide(target, window, settings=SETTINGS, now_s=at_s)
        turned_s += [at_s] * (after.turns - target.turns)
        target = after
    gaps = [(later - earlier) / R for earlier, later in pairwise(turned_s)]
    assert gaps[1:10:2] == [2, 4, 8, 16, 16], "until nodes are taken away again"
    assert len(turned_s) < 200 / 16 * 2 + 10


@given(st.lists(st.tuples(shares, shares, shares, st.floats(min_value=1, max_value=200)), max_size=60))
def test_any_input_turns_no_more_often_than_the_bound(
    inputs: Sequence[tuple[float, float, float, float]],
) -> None:
    target, now_s, turned_s = PoolTarget(nodes=4), 0.0, []
    for wait, busy, stale, passed_s in inputs:
        now_s += passed_s
        window = PoolWindow(nodes=target.nodes, wait_share=wait, busy_share=busy, staleness_share=stale)
        after = decide(target, window, settings=SETTINGS, now_s=now_s)
        assert 1 <= after.nodes <= MOST
        assert math.ceil(target.nodes / 2) <= after.nodes <= max(target.nodes * 2, target.nodes + 1)
        turned_s += [now_s] * (after.turns - target.turns)
        target = after
    for begin in turned_s:
        for span_s in (R / 2, R, 3 * R):
            turns = sum(begin <= at < begin + span_s for at in turned_s)
            assert turns <= 2 * math.floor(span_s / R) + 3


@given(
    load=st.floats(min_value=0.2, max_value=MOST),
    start=st.integers(min_value=1, max_value=MOST),
    noise=st.lists(errors, min_size=30, max_size=30),
)
def test_a_constant_load_with_noise_turns_at_most_once_and_is_met(
    load: float, start: int, noise: Sequence[tuple[float, float, float]]
) -> None:
    target = PoolTarget(nodes=start)
    for number, error in enumerate(noise):
        window = measured(target.nodes, load, error)
        target = decide(target, window, settings=SETTINGS, now_s=number * R)
    assert target.turns <= 1
    assert 1 - target.nodes / load <= SETTINGS.grow_above_wait + NOISE, "no trainer starves"
    assert target.nodes <= (load + NOISE * target.nodes) / SETTINGS.fill + 1, "no node idles"


def measured(nodes: int, load: float, error: tuple[float, float, float]) -> PoolWindow:
    """What `nodes` show when a trainer could use `load` of them."""
    wait, busy, stale = max(0.0, 1 - nodes / load), min(1.0, load / nodes), 1.0 if nodes > load else 0.2
    exact = (wait, busy, stale)
    wait, busy, stale = (min(1.0, max(0.0, value + off)) for value, off in zip(exact, error, strict=True))
    return PoolWindow(nodes=nodes, wait_share=wait, busy_share=busy, staleness_share=stale)
