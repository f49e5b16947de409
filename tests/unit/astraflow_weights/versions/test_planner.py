"""The plan is the cheapest path the log offers, compared with trying all of them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.errors import UnknownVersionError
from astraflow_weights.errors import Edge, NoPath
from astraflow_weights.store.file import FileStore
from astraflow_weights.versions.log import VersionLog
from astraflow_weights.versions.planner import PullPlan, plan_pull
from astraflow_weights.versions.rates import PullCosts
from support.log_records import version_record
from support.weight_models import POLICY, RUN

# Sizes of one version: its snapshot (None: it has none) and its deltas by base version, merged ones too.
Offer = tuple[int | None, dict[int, int]]


class KnownLog(VersionLog):
    """A log whose records are given, not read."""

    def __init__(self, offers: list[Offer]) -> None:
        super().__init__(FileStore(Path("/nonexistent")), run_id=RUN, policy_id=POLICY)
        self._history.records = [
            version_record(version, snapshot=snapshot, deltas=deltas)
            for version, (snapshot, deltas) in enumerate(offers)
        ]


def edges(plan: PullPlan) -> list[tuple[int | None, int]]:
    return [(step.edge.base_version, step.edge.version) for step in plan.steps]


CHAIN: list[Offer] = [(100, {}), (None, {0: 5}), (None, {1: 5}), (100, {2: 5}), (None, {3: 5})]


@pytest.mark.parametrize(
    ("held", "target", "expected"),
    [
        (None, 0, [(None, 0)]),
        (None, 2, [(None, 0), (0, 1), (1, 2)]),
        (None, 3, [(None, 3)]),
        (None, 4, [(None, 3), (3, 4)]),
        (0, 4, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        (3, 4, [(3, 4)]),
        (4, 4, []),
        (4, 2, [(None, 0), (0, 1), (1, 2)]),
    ],
)
def test_the_cheapest_of_paths(held: int | None, target: int, expected: list[tuple[int | None, int]]) -> None:
    plan = plan_pull(KnownLog(CHAIN), held=held, target=target)
    assert edges(plan) == expected
    assert plan.held == (held if not expected or expected[0][0] is not None else None)


def test_of_equal_paths_the_one_with_fewer_steps() -> None:
    offers: list[Offer] = [(10, {}), (20, {0: 10})]
    assert edges(plan_pull(KnownLog(offers), held=None, target=1)) == [(None, 1)]


def test_paths_that_proved_bad_are_avoided() -> None:
    bad = frozenset({Edge(version=2, base_version=1)})
    assert edges(plan_pull(KnownLog(CHAIN), held=1, target=3, avoid=bad)) == [(None, 3)]
    with pytest.raises(NoPath, match="1 paths proved bad: wait for the next snapshot"):
        plan_pull(KnownLog(CHAIN), held=1, target=2, avoid=bad)


def far_and_fast(objects_in_parallel: int = 1) -> PullCosts:
    """A store that answers after a second, and then at once."""
    return PullCosts(fetch_s_per_byte=1e-9, latency_s=1.0, parallel=objects_in_parallel)


def test_a_store_that_is_far_away_is_asked_less_often() -> None:
    offers: list[Offer] = [(100, {}), (None, {0: 5}), (None, {1: 5}), (None, {2: 5, 0: 20})]
    log = KnownLog(offers)
    assert edges(plan_pull(log, held=0, target=3)) == [(0, 1), (1, 2), (2, 3)]
    assert edges(plan_pull(log, held=0, target=3, costs=far_and_fast())) == [(0, 3)]
    assert len(plan_pull(log, held=0, target=3, costs=far_and_fast(3)).steps) == 3, "three are one wait"


def test_a_path_that_is_dearer_half_way_may_be_the_cheapest_in_the_end() -> None:
    """Five bytes in two objects reach version 2 first; with the object to version 3 they are one too many."""
    offers: list[Offer] = [(100, {}), (None, {0: 2}), (None, {1: 3, 0: 9}), (None, {2: 5})]
    log = KnownLog(offers)
    assert edges(plan_pull(log, held=0, target=2, costs=far_and_fast(2))) == [(0, 1), (1, 2)]
    assert edges(plan_pull(log, held=0, target=3, costs=far_and_fast(2))) == [(0, 2), (2, 3)]


def test_a_kind_that_is_slow_to_decode_costs_that() -> None:
    offers: list[Offer] = [(100, {}), (100, {0: 60})]
    log = KnownLog(offers)
    slow = PullCosts(snapshot_s_per_byte=0, delta_s_per_byte=1e-7)
    assert edges(plan_pull(log, held=0, target=1)) == [(0, 1)]
    assert edges(plan_pull(log, held=0, target=1, costs=slow)) == [(None, 1)]


def test_a_version_that_the_log_has_not_read_is_unknown() -> None:
    with pytest.raises(UnknownVersionError):
        plan_pull(KnownLog(CHAIN), held=None, target=5)


@st.composite
def logs(draw: st.DrawFn) -> list[Offer]:
    sizes = st.integers(1, 30)
    offers: list[Offer] = [(draw(sizes), {})]
    for version in range(1, draw(st.integers(1, 7))):
        bases = draw(st.sets(st.integers(0, version - 1), max_size=3))
        offers.append((draw(st.none() | sizes), {base: draw(sizes) for base in bases}))
    return offers


def cheapest(offers: list[Offer], *, held: int | None, target: int) -> int | None:
    """By trying everything."""
    if held == target:
        return 0
    snapshot, deltas = offers[target]
    costs = [] if snapshot is None else [snapshot]
    for base, size in deltas.items():
        before = cheapest(offers, held=held, target=base)
        if before is not None:
            costs.append(before + size)
    return min(costs, default=None)


@given(logs(), st.data())
def test_no_path_is_cheaper_than_the_plan(offers: list[Offer], data: st.DataObject) -> None:
    target = data.draw(st.integers(0, len(offers) - 1))
    held = data.draw(st.none() | st.integers(0, len(offers) - 1))
    expected = cheapest(offers, held=held, target=target)
    if expected is None:
        with pytest.raises(NoPath):
            plan_pull(KnownLog(offers), held=held, target=target)
        return
    plan = plan_pull(KnownLog(offers), held=held, target=target)
    assert plan.size_bytes == expected
    follow = [plan.held, *(step.edge.version for step in plan.steps)]
    assert [step.edge.base_version for step in plan.steps] == follow[:-1]
    assert follow[-1] == target
