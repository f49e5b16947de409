"""Old parts go, in rounds; whoever needs one, or may come to need one, keeps it."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from astraflow_kit.failpoints import FailpointRaised
from astraflow_weights import errors, settings
from astraflow_weights.collection.collector import Collector, Stage
from astraflow_weights.collection.retention import Roots, paths_of
from astraflow_weights.collection.rounds import FORGET_S
from astraflow_weights.tools.verification import verify_version
from astraflow_weights.versions.collection_records import PullLease, decode_tombstone, encode_lease
from astraflow_weights.versions.identity import remember_identity
from astraflow_weights.versions.inspection import build_version, buildable
from astraflow_weights.versions.intents import INTENT_S, UploadIntents
from astraflow_weights.versions.planner import plan_pull
from astraflow_weights.versions.standing import ServerStanding
from support import manual_clock, published_models
from support.armed import armed
from support.weight_models import KEYS, FaultyStore, overwrite, same_model

SETTINGS = settings.PublishSettings(snapshot_every_versions=3, snapshot_chain_ratio=100)
LAST = 10
HORIZON = 6


class Published(published_models.PublishedModels):
    """Versions 0 to 10 with snapshots at 0, 3, 6 and 9, and a collector of them."""

    def __init__(self, store: FaultyStore) -> None:
        self.clock = manual_clock.ManualClock()
        self.roots = Roots()
        super().__init__(store, settings=SETTINGS, clock=self.clock)
        self.publish_up_to(LAST)

    def open_publisher(self, *, epoch: int, version: int = -1) -> published_models.ModelPublisher:
        """`version` is the newest one that is in the log, if not that of the last model."""
        writer = published_models.open_writer(self.store, epoch, settings=SETTINGS, clock=self.clock)
        return published_models.ModelPublisher(writer, base=self.models[version])

    def collector(self, roots: Callable[[], Roots] | None = None) -> Collector:
        return published_models.new_collector(self.store, self.clock, roots or (lambda: self.roots))

    def begun(self) -> Collector:
        """A collector whose round's grace is over."""
        collector = self.collector()
        assert collector.step().stage is Stage.BEGUN
        self.clock.now_s += published_models.GRACE_S
        return collector

    def collect(self, collector: Collector | None = None) -> None:
        """Everything that can go now goes."""
        published_models.collect_all(collector or self.collector(), self.clock)

    def parts(self) -> set[str]:
        return {info.key for info in self.store.list(KEYS.parts)}

    def named(self) -> set[str]:
        """Keys of the parts that a path names which is offered."""
        return {part.key for record in self.log().records for _, parts in paths_of(record) for part in parts}

    def check(self, *versions: int) -> None:
        """These can be built, exactly, and are whole."""
        log = self.log()
        for version in versions:
            assert same_model(build_version(self.store, log, target=version, threads=2), self.models[version])
            assert verify_version(self.store, log, version=version, threads=2).faults == ()


@pytest.fixture
def published(store: FaultyStore) -> Published:
    return Published(store)


def test_the_newest_two_snapshots_and_all_after_stay_and_nothing_else(published: Published) -> None:
    published.collect()
    published.check(*range(HORIZON, LAST + 1))
    log = published.log()
    assert buildable(log) == set(range(HORIZON, LAST + 1))
    assert published.parts() == published.named()
    for version in range(HORIZON):
        with pytest.raises(errors.NoPath):
            plan_pull(log, held=None, target=version)
        (fault,) = verify_version(published.store, log, version=version, threads=2).faults
        assert "were collected" in fault.problem


def test_a_pinned_version_keeps_its_cheapest_path_and_no_more(published: Published) -> None:
    published.roots = Roots(pinned=frozenset([4]))
    published.collect()
    published.check(4, *range(HORIZON, LAST + 1))
    assert buildable(published.log()) == {3, 4, *range(HORIZON, LAST + 1)}
    published.roots = Roots()
    published.collect()
    assert buildable(published.log()) == set(range(HORIZON, LAST + 1))


def test_a_node_that_serves_an_old_version_keeps_its_path_on(published: Published) -> None:
    published.roots = Roots(served=frozenset([5]))
    path = plan_pull(published.log(), held=5, target=LAST)
    published.collect()
    assert plan_pull(published.log(), held=5, target=LAST) == path


def test_what_is_being_pulled_stays_until_the_lease_ends(published: Published) -> None:
    plan = plan_pull(published.log(), held=None, target=2)
    parts = frozenset(part.sha256 for step in plan.steps for part in step.parts)
    lease = PullLease(holder=b"h" * 16, parts=parts, expires_time_s=published.clock.wall_time_s() + 2000)
    published.store.put_if_absent(KEYS.lease(lease.holder, 0), encode_lease(KEYS, lease))
    published.collect()
    kept = {part.key for step in plan.steps for part in step.parts}
    assert kept <= published.parts()
    published.clock.now_s += 3000
    published.collect()
    assert kept.isdisjoint(published.parts())
    assert list(published.store.list(KEYS.leases)) == []


def test_nothing_goes_before_the_grace(published: Published) -> None:
    collector, before = published.collector(), published.parts()
    assert collector.step().stage is Stage.BEGUN
    assert collector.step().stage is Stage.GRACE
    published.clock.now_s += published_models.GRACE_S - 1
    assert collector.step().stage is Stage.GRACE
    assert published.parts() == before
    published.clock.now_s += 1
    assert collector.step().stage is Stage.SWEPT


def test_a_version_pinned_during_the_grace_stays(published: Published) -> None:
    collector = published.begun()
    published.roots = Roots(pinned=frozenset([1, 5]))
    collector.step()
    published.check(1, 5, *range(HORIZON, LAST + 1))


def test_without_an_answer_about_pins_nothing_is_collected(published: Published) -> None:
    def refuse() -> Roots:
        raise errors.Unavailable("the server is down")

    before = published.parts()
    with pytest.raises(errors.Unavailable):
        published.collector(refuse).step()
    published.begun()
    with pytest.raises(errors.Unavailable):
        published.collector(refuse).step()
    assert published.parts() == before


def test_a_writer_that_began_before_the_tombstone_is_waited_for(published: Published) -> None:
    intents = UploadIntents(published.store, keys=KEYS, clock=published.clock)
    intents.open(epoch=1)
    collector = published.begun()
    assert collector.step().stage is Stage.WRITERS
    intents.close()
    assert collector.step().stage is Stage.SWEPT


@pytest.mark.parametrize("ends", ["fence", "time"])
def test_a_writer_that_died_blocks_until_the_next_fence_or_an_hour(published: Published, ends: str) -> None:
    UploadIntents(published.store, keys=KEYS, clock=published.clock).open(epoch=1)
    collector = published.begun()
    assert collector.step().stage is Stage.WRITERS
    if ends == "fence":
        published.open_publisher(epoch=2)
    else:
        published.clock.now_s += INTENT_S
    assert collector.step().stage is Stage.SWEPT
    published.collect(collector)
    assert list(published.store.list(KEYS.intents)) == [], "what is over is removed"


def test_parts_that_a_killed_publication_left_go_unless_they_come_to_be_named(published: Published) -> None:
    published.collect()
    whole = published.parts()
    with armed("weights.publish.before_manifest=raise"), pytest.raises(FailpointRaised):
        published.publish()
    strays = published.parts() - whole
    assert strays
    published.publisher = published.open_publisher(epoch=2, version=LAST)
    collector = published.collector()
    collector.step()
    published.clock.now_s += INTENT_S
    assert collector.step().stage is Stage.BEGUN
    # The same bytes again, while their names are in a tombstone: under other names.
    published.publisher.publish(published.models[-1], step=LAST + 1)
    published.clock.now_s += published_models.GRACE_S
    assert collector.step().stage is Stage.SWEPT
    assert strays.isdisjoint(published.parts())
    published.check(LAST + 1)


def test_a_swept_name_is_stored_anew_when_it_is_wanted_again(published: Published) -> None:
    """A publication repeats a killed one's bytes after they were deleted, and before the tombstone is removed."""
    with armed("weights.publish.before_manifest=raise"), pytest.raises(FailpointRaised):
        published.publish()
    published.publisher = published.open_publisher(epoch=2, version=LAST)
    published.clock.now_s += INTENT_S
    collector = published.collector()
    collector.step()
    published.collect(collector)
    tombstones = [published.store.get(info.key) for info in published.store.list(KEYS.tombstones)]
    deleted = {name for tombstone in tombstones for name in decode_tombstone(KEYS, tombstone).parts}
    assert deleted
    published.publisher.publish(published.models[-1], step=LAST + 1)
    record = published.log().record(LAST + 1)
    named = {part.sha256 for _, parts in paths_of(record) for part in parts}
    assert named.isdisjoint(deleted)
    for name in deleted:
        # A DELETE that was on its way for long.
        published.store.delete(KEYS.part(name.hex()))
    published.check(LAST + 1)


@pytest.mark.parametrize("moment", ["tombstoned", "deleting", "deleting@3"])
def test_a_collector_that_dies_is_followed_up_by_the_next(published: Published, moment: str) -> None:
    name, _, nth = moment.partition("@")
    collector = published.collector()
    if moment != "tombstoned":
        collector.step()
    published.clock.now_s += published_models.GRACE_S
    with armed(f"weights.collection.{name}=raise@{nth or 1}"), pytest.raises(FailpointRaised):
        collector.step()
    published.check(*range(HORIZON, LAST + 1))
    published.collect()
    published.check(*range(HORIZON, LAST + 1))
    assert published.parts() == published.named()


def test_two_collectors_work_on_one_round_and_delete_the_same(published: Published) -> None:
    first, second = published.collector(), published.collector()
    assert first.step().stage is Stage.BEGUN
    assert second.step().stage is Stage.GRACE
    published.clock.now_s += published_models.GRACE_S
    assert second.step().stage is Stage.SWEPT
    assert first.step().stage is Stage.NOTHING
    assert len(list(published.store.list(KEYS.swept))) == 1


def test_a_snapshot_with_a_missing_part_does_not_count(published: Published) -> None:
    published.store.delete((published.log().record(9).snapshot or ())[0].key)
    published.collect()
    assert buildable(published.log()) >= set(range(3, LAST + 1))
    model = build_version(published.store, published.log(), target=8, threads=2)
    assert same_model(model, published.models[8])
    avoid = frozenset([errors.Edge(version=9, base_version=None)])
    plan = plan_pull(published.log(), held=None, target=LAST, avoid=avoid)
    assert {part.key for step in plan.steps for part in step.parts} <= published.parts()


def test_rounds_of_yesterday_are_forgotten_and_what_they_swept_stays_swept(published: Published) -> None:
    published.collect()
    published.publish_up_to(LAST + 7)
    published.collect()
    assert len(list(published.store.list(KEYS.tombstones))) == 2
    published.clock.now_s += FORGET_S + 1
    published.collect()
    assert [info.key for info in published.store.list(KEYS.tombstones)] == [KEYS.tombstone(1)]
    assert 0 not in buildable(published.log())


def test_a_tombstone_of_a_forgotten_number_deletes_nothing(published: Published) -> None:
    """A collector that slept for a day creates a round whose number was decided long ago."""
    published.collect()
    published.publish_up_to(LAST + 7)
    collector = published.begun()
    tombstone = published.store.get(KEYS.tombstone(1))
    collector.step()
    overwrite(published.store, KEYS.tombstone(0), tombstone)
    published.collect()
    published.check(LAST + 7)


def test_a_log_with_too_few_snapshots_keeps_everything(published: Published) -> None:
    survey = published_models.new_collector(
        published.store, published.clock, Roots, keep_snapshots=5
    ).survey()
    assert survey.horizon == 0
    assert not survey.unnamed


def test_a_survey_tells_what_is_kept_and_why(published: Published) -> None:
    published.roots = Roots(pinned=frozenset([4]), announced=2)
    survey = published.collector().survey()
    shares = {share.why: share for share in survey.kept}
    assert shares["pinned"].paths == 2
    assert shares["newest announced"].paths == 3
    assert survey.horizon == HORIZON
    total = sum(share.size_bytes for share in survey.kept) + sum(survey.garbage.values())
    assert total == sum(info.size_bytes for info in published.store.list(KEYS.parts))


def test_nothing_is_collected_on_the_word_of_a_server_that_lost_what_the_log_knows(
    published: Published,
) -> None:
    """It has forgotten pins, too."""
    remember_identity(published.store, KEYS, "a" * 32)
    collector, before = published.begun(), published.parts()
    knows = ServerStanding(identity="a" * 32, finished_step=LAST, version=LAST)
    published.roots = Roots(standing=replace(knows, identity="b" * 32))
    with pytest.raises(errors.StateInDoubt, match="nothing is collected"):
        collector.step()
    assert published.parts() == before
    published.roots = Roots(standing=knows)
    assert collector.step().stage is Stage.SWEPT
