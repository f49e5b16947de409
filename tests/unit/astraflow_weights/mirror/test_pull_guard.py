"""A pull is announced before it begins, and goes around what is about to be collected."""

from pathlib import Path

import pytest

from astraflow_weights import errors, settings
from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.mirror.pull_guard import PullGuard
from astraflow_weights.versions.collection_records import PullLease, decode_lease
from astraflow_weights.versions.log import VersionLog
from astraflow_weights.versions.planner import PullPlan, plan_pull
from support.manual_clock import ManualClock
from support.published_models import bury, published
from support.weight_models import KEYS, FaultyStore


@pytest.fixture
def store(store: FaultyStore) -> FaultyStore:
    """Versions 0 to 3, each with a snapshot."""
    published(store, 4, settings=settings.PublishSettings(snapshot_every_versions=1))
    return store


def leases(store: FaultyStore) -> list[PullLease]:
    """What is leased now."""
    return [decode_lease(KEYS, store.get(info.key)) for info in store.list(KEYS.leases)]


def parts_of(plan: PullPlan) -> frozenset[bytes]:
    """sha256 of every part of a plan."""
    return frozenset(part.sha256 for step in plan.steps for part in step.parts)


def planned(guard: PullGuard, log: VersionLog, *, avoid: frozenset[errors.Edge] = frozenset()) -> PullPlan:
    """The plan from version 1 to 3."""
    return guard.plan(lambda avoided: plan_pull(log, held=1, target=3, avoid=avoided), avoid=avoid)


def test_while_a_pull_runs_every_part_of_its_plan_is_leased(store: FaultyStore, log: VersionLog) -> None:
    clock = ManualClock()
    guard = PullGuard(lease_s=100, clock=clock)
    with guard.over(store, log):
        plan = planned(guard, log)
        (lease,) = leases(store)
        assert lease.parts == parts_of(plan)
        assert lease.expires_time_s == clock.wall_time_s() + 100
    assert leases(store) == []


def test_a_plan_with_a_part_about_to_be_collected_is_avoided(store: FaultyStore, log: VersionLog) -> None:
    cheapest = plan_pull(log, held=1, target=3)
    bury(store, 0, cheapest.steps[0].parts[0].sha256)
    guard = PullGuard()
    with guard.over(store, log):
        plan = planned(guard, log)
        assert [step.edge for step in plan.steps] == [errors.Edge(version=3, base_version=None)]
        (lease,) = leases(store)
        assert lease.parts == parts_of(plan), "the lease must name what is fetched, not what was dropped"


def test_where_every_path_is_to_be_collected_one_is_tried_anyway(store: FaultyStore, log: VersionLog) -> None:
    bury(store, 0, *(part.sha256 for record in log.records for part in record.snapshot or ()))
    guard = PullGuard()
    with guard.over(store, log):
        plan = guard.plan(lambda avoid: plan_pull(log, held=None, target=0, avoid=avoid))
    assert plan.target == 0


def test_a_target_that_nothing_leads_to_is_told(store: FaultyStore, log: VersionLog) -> None:
    guard = PullGuard()
    everything = frozenset(errors.Edge(version=3, base_version=base) for base in (None, 2))
    with guard.over(store, log), pytest.raises(errors.NoPath):
        planned(guard, log, avoid=everything)
    assert leases(store) == []


def test_a_long_pull_renews_its_lease_and_holds_only_one(store: FaultyStore, log: VersionLog) -> None:
    guard = PullGuard(lease_s=0.03)
    with guard.over(store, log):
        planned(guard, log)
        first = {info.key for info in store.list(KEYS.leases)}
        while first & {info.key for info in store.list(KEYS.leases)}:
            pass
    assert leases(store) == []


@pytest.fixture
def refusals(store: FaultyStore) -> list[str]:
    """Makes the store read-only, as for a node whose credentials cannot write; the keys it refused."""
    keys: list[str] = []

    def refuse(key: str, data: bytes) -> None:
        keys.append(key)
        raise errors.StoreRefused(f"{len(data)} bytes for {key} are not allowed")

    store.before_put = refuse
    return keys


def test_a_mirror_that_may_not_write_pulls_without_a_lease(
    store: FaultyStore, log: VersionLog, refusals: list[str], tmp_path: Path
) -> None:
    mirror = Mirror(tmp_path / "mirror")
    for target in (1, 3):
        assert mirror.advance(store, log, target=target).version == target
    assert len(refusals) == 1, "it is refused once and not asked again"


@pytest.mark.usefixtures("refusals")
def test_a_missing_part_without_a_lease_is_one_more_path_that_proves_bad(
    store: FaultyStore, log: VersionLog, tmp_path: Path
) -> None:
    mirror = Mirror(tmp_path / "mirror")
    mirror.advance(store, log, target=1)
    (step,) = plan_pull(log, held=1, target=2).steps
    store.delete(step.parts[0].key)
    result = mirror.advance(store, log, target=2)
    assert result.version == 2
    assert result.rejected == {step.edge}
