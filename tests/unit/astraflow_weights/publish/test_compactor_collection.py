"""The compactor's thread collects, too, and neither publishing nor compaction depends on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from astraflow_weights.collection.collector import Collector
from astraflow_weights.collection.retention import Roots
from astraflow_weights.errors import Unavailable
from astraflow_weights.publish.compactor import Compactor
from astraflow_weights.settings import CollectionSettings, PublishSettings
from astraflow_weights.store.file import FileStore
from astraflow_weights.tools.verification import verify_version
from astraflow_weights.versions.inspection import buildable
from astraflow_weights.versions.log import VersionLog
from support.published_models import PublishedModels, read_log
from support.weight_models import POLICY, RUN

SETTINGS = PublishSettings(snapshot_every_versions=3, snapshot_chain_ratio=100)
PATIENCE_S = 120.0


class Training(PublishedModels):
    """A publisher with a compactor and a collector beside it."""

    def __init__(self, folder: Path, roots: Callable[[], Roots], *, grace_s: float = 0.0) -> None:
        self.store = FileStore(folder)
        super().__init__(self.store, settings=SETTINGS, inline_snapshots=False)
        collector = Collector(
            self.store,
            run_id=RUN,
            policy_id=POLICY,
            roots=roots,
            settings=CollectionSettings(keep_snapshots=2, grace_s=grace_s),
        )
        self.compactor = Compactor(
            self.store,
            run_id=RUN,
            policy_id=POLICY,
            kept=self.publisher.kept,
            settings=SETTINGS,
            collector=collector,
        )

    def step(self) -> None:
        """Publish the next version, and tell the compactor."""
        self.publish()
        self.compactor.notify()

    def log(self) -> VersionLog:
        return read_log(self.store)

    def wait_until(self, condition: Callable[[VersionLog], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition(self.log()):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_run_with_collection_beside_it_keeps_what_is_retained_or_pinned_whole(tmp_path: Path) -> None:
    training = Training(tmp_path, lambda: Roots(pinned=frozenset([2])))
    with training.compactor:
        for step in range(20):
            training.step()
            if step % 3 == 0:
                training.wait_until(lambda log: any(r.offered_snapshot for r in log.records[-3:]))
        training.wait_until(lambda log: 4 not in buildable(log))
    log = training.log()
    kept = buildable(log)
    assert {2, 19} <= kept
    for version in kept:
        assert verify_version(training.store, log, version=version, threads=2).faults == ()


def test_without_an_answer_about_pins_all_stays_and_compaction_goes_on(tmp_path: Path) -> None:
    asked = []

    def refuse() -> Roots:
        asked.append(True)
        raise Unavailable("the server is down")

    training = Training(tmp_path, refuse)
    with training.compactor:
        for _ in range(9):
            training.step()
        training.wait_until(lambda log: bool(log.record(8).added) and bool(asked))
    assert len(buildable(training.log())) == 9


def test_leaving_waits_for_no_grace(tmp_path: Path) -> None:
    training = Training(tmp_path, Roots, grace_s=86_400.0)
    with training.compactor:
        for _ in range(9):
            training.step()
            training.wait_until(lambda log: any(r.offered_snapshot for r in log.records[-3:]))
    # Leaving that waited would not end before the test's own limit.
    assert len(buildable(training.log())) == 9
