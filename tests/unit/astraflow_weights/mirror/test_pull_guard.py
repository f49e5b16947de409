"""A pull is announced before it begins, and goes around what is about to be collected."""

from pathlib import Path

import pytest

from astraflow_weights.errors import Edge, NoPath, StoreRefused
from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.mirror.pull_guard import PullGuard
from astraflow_weights.settings import PublishSettings
from astraflow_weights.store import PutResult
from astraflow_weights.store.file import FileStore
from astraflow_weights.store.layout import PolicyKeys
from astraflow_weights.versions.collection_records import (
    PullLease,
    Tombstone,
    decode_lease,
    encode_tombstone,
)
from astraflow_weights.versions.log import VersionLog
from astraflow_weights.versions.planner import PullPlan, plan_pull
from support.manual_clock import ManualClock
from support.published_models import published, read_log
from support.weight_models import POLICY, RUN

KEYS = PolicyKeys(RUN, POLICY)


class ReadOnlyStore(FileStore):
    """What a node sees whose credentials cannot write."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.refusals = 0

    def put_if_absent(self, key: str, data: bytes) -> PutResult:
        """Refuse."""
        self.refusals += 1
        raise StoreRefused(f"{len(data)} bytes for {key} are not allowed")


@pytest.fixture
def store(store: FileStore) -> FileStore:
    """Versions 0 to 3, each with a snapshot."""
    published(store, 4, settings=PublishSettings(snapshot_every_versions=1))
    return store


@pytest.fixture
def log(store: FileStore) -> VersionLog:
    return read_log(store)


def leases(store: FileStore) -> list[PullLease]:
    """What is leased now."""
    return [decode_lease(KEYS, store.get(info.key)) for info in store.list(KEYS.leases)]


def parts_of(plan: PullPlan) -> frozenset[bytes]:
    """sha256 of every part of a plan."""
    return frozenset(part.sha256 for step in plan.steps for part in step.parts)


def bury(store: FileStore, parts: frozenset[bytes]) -> None:
    """Put parts into a tombstone."""
    tombstone = Tombstone(number=0, parts=parts, created_time_s=0)
    store.put_if_absent(KEYS.tombstone(0), encode_tombstone(KEYS, tombstone))


def test_while_a_pull_runs_every_part_of_its_plan_is_leased(store: FileStore, log: VersionLog) -> None:
    clock = ManualClock()
    guard = PullGuard(lease_s=100, clock=clock)
    with guard.over(store, log):
        plan = guard.plan(lambda avoid: plan_pull(log, held=1, target=3, avoid=avoid))
        (lease,) = leases(store)
        assert lease.parts == parts_of(plan)
        assert lease.expires_time_s == clock.wall_time_s() + 100
    assert leases(store) == []


def test_a_plan_with_a_part_that_is_about_to_be_collected_is_planned_around(
    store: FileStore, log: VersionLog
) -> None:
    cheapest = plan_pull(log, held=1, target=3)
    bury(store, frozenset([cheapest.steps[0].parts[0].sha256]))
    guard = PullGuard()
    with guard.over(store, log):
        plan = guard.plan(lambda avoid: plan_pull(log, held=1, target=3, avoid=avoid))
        assert [step.edge for step in plan.steps] == [Edge(version=3, base_version=None)]
        (lease,) = leases(store)
        assert lease.parts == parts_of(plan), "the lease must name what is fetched, not what was dropped"


def test_where_every_path_is_about_to_be_collected_one_is_tried_all_the_same(
    store: FileStore, log: VersionLog
) -> None:
    bury(store, frozenset(part.sha256 for r in log.records for part in (*(r.snapshot or ()),)))
    guard = PullGuard()
    with guard.over(store, log):
        plan = guard.plan(lambda avoid: plan_pull(log, held=None, target=0, avoid=avoid))
    assert plan.target == 0


def test_a_target_that_nothing_leads_to_is_told(store: FileStore, log: VersionLog) -> None:
    guard = PullGuard()
    everything = frozenset(Edge(version=3, base_version=base) for base in (None, 2))
    with guard.over(store, log), pytest.raises(NoPath):
        guard.plan(lambda avoid: plan_pull(log, held=1, target=3, avoid=avoid), avoid=everything)
    assert leases(store) == []


def test_a_long_pull_renews_its_lease_and_holds_only_one(store: FileStore, log: VersionLog) -> None:
    guard = PullGuard(lease_s=0.03)
    with guard.over(store, log):
        guard.plan(lambda avoid: plan_pull(log, held=1, target=3, avoid=avoid))
        first = {info.key for info in store.list(KEYS.leases)}
        while first & {info.key for info in store.list(KEYS.leases)}:
            pass
    assert leases(store) == []


def test_a_mirror_that_may_not_write_pulls_without_a_lease(store: FileStore, tmp_path: Path) -> None:
    read_only = ReadOnlyStore(tmp_path / "store")
    log = read_log(read_only)
    mirror = Mirror(tmp_path / "mirror")
    for target in (1, 3):
        assert mirror.advance(read_only, log, target=target).version == target
    assert read_only.refusals == 1, "it is refused once and not asked again"


def test_a_missing_part_without_a_lease_is_one_more_path_that_proves_bad(
    store: FileStore, tmp_path: Path
) -> None:
    read_only = ReadOnlyStore(tmp_path / "store")
    log = read_log(read_only)
    mirror = Mirror(tmp_path / "mirror")
    mirror.advance(read_only, log, target=1)
    (step,) = plan_pull(log, held=1, target=2).steps
    store.delete(step.parts[0].key)
    result = mirror.advance(read_only, log, target=2)
    assert result.version == 2
    assert result.rejected == {step.edge}
