"""The compactor's thread collects, too, and neither publishing nor compaction depends on it."""

from collections.abc import Callable

from astraflow_weights import errors, settings
from astraflow_weights.collection.retention import Roots
from astraflow_weights.tools.verification import verify_version
from astraflow_weights.versions.inspection import buildable
from astraflow_weights.versions.log import VersionLog
from support.published_models import PublishedModels, new_collector, new_compactor
from support.scripted_batches import eventually
from support.weight_models import FaultyStore

SETTINGS = settings.PublishSettings(snapshot_every_versions=3, snapshot_chain_ratio=100)


class Training(PublishedModels):
    """A publisher with a compactor and a collector beside it."""

    def __init__(
        self, store: FaultyStore, roots: Callable[[], Roots] = Roots, *, grace_s: float = 0.0
    ) -> None:
        super().__init__(store, settings=SETTINGS, inline_snapshots=False)
        collector = new_collector(store, None, roots, grace_s=grace_s)
        kept = self.publisher.kept
        self.compactor = new_compactor(store, kept=kept, settings=SETTINGS, collector=collector)

    def step(self) -> None:
        """Publish the next version, and tell the compactor."""
        self.publish()
        self.compactor.notify()

    def wait_until(self, condition: Callable[[VersionLog], bool], what: str) -> None:
        eventually(lambda: condition(self.log()), what=what, patience_s=120.0)

    def wait_for_a_snapshot(self) -> None:
        """Among the newest three versions."""
        self.wait_until(lambda log: any(r.offered_snapshot for r in log.records[-3:]), "a snapshot")


def test_a_run_with_collection_beside_it_keeps_what_is_retained_or_pinned_whole(store: FaultyStore) -> None:
    training = Training(store, lambda: Roots(pinned=frozenset([2])))
    with training.compactor:
        for step in range(20):
            training.step()
            if step % 3 == 0:
                training.wait_for_a_snapshot()
        training.wait_until(lambda log: 4 not in buildable(log), "version 4 to be collected")
    log = training.log()
    kept = buildable(log)
    assert {2, 19} <= kept
    for version in kept:
        assert verify_version(store, log, version=version, threads=2).faults == ()


def test_without_an_answer_about_pins_all_stays_and_compaction_goes_on(store: FaultyStore) -> None:
    asked = []

    def refuse() -> Roots:
        asked.append(True)
        raise errors.Unavailable("the server is down")

    training = Training(store, refuse)
    with training.compactor:
        for _ in range(9):
            training.step()
        training.wait_until(lambda log: bool(log.record(8).added) and bool(asked), "a path to version 8")
    assert len(buildable(training.log())) == 9


def test_leaving_waits_for_no_grace(store: FaultyStore) -> None:
    training = Training(store, grace_s=86_400.0)
    with training.compactor:
        for _ in range(9):
            training.step()
            training.wait_for_a_snapshot()
    # Leaving that waited would not end before the test's own limit.
    assert len(buildable(training.log())) == 9
