"""Collectors beside publishers, in processes, over a folder and over S3: together, and killed in their windows."""

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from astraflow_weights.collection.retention import paths_of
from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.store import ObjectStore, open_store
from astraflow_weights.store.layout import PolicyKeys
from astraflow_weights.tools.verification import verify_version
from astraflow_weights.versions.inspection import buildable
from support import weight_processes as processes
from support.s3_server import S3Server
from support.weight_models import POLICY, RUN, same_model
from support.weight_processes import publish, read_log

pytestmark = pytest.mark.timeout(1200)

KEYS = PolicyKeys(RUN, POLICY)
VERSIONS = 24
KILLS = (
    ("publish", "weights.publish.uploading=kill@6"),
    ("publish", "weights.publish.before_manifest=kill@6"),
    ("publish", "weights.compaction.parts_uploaded=kill@1"),
    ("publish", "weights.log_checkpoint.stored=kill@2"),
    ("collect", "weights.collection.tombstoned=kill@1"),
    ("collect", "weights.collection.deleting=kill@3"),
    ("publish", "weights.collection.deleting=kill@2"),
)
OVER_S3 = (KILLS[1], KILLS[4])
"""One publisher, one collector: in ci the windows are walked through over a folder."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A store that processes can open."""

    store: ObjectStore
    uri: str
    environment: Mapping[str, str]

    def start(self, task: str, folder: Path, **options: Any) -> subprocess.Popen[str]:
        """A process that works on it."""
        return processes.start(task, self.uri, folder, environment=self.environment, **options)


@pytest.fixture(params=["file", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A folder, and moto."""
    if request.param == "file":
        uri = f"file://{tmp_path}/store"
        yield Place(store=open_store(uri), uri=uri, environment={})
        return
    with S3Server(tmp_path) as server:
        store = server.store(server.create_bucket("weights"), max_attempts=6)
        yield Place(store=store, uri="s3://weights", environment=server.environment)


@pytest.mark.ci
def test_publishers_and_collectors_work_at_the_same_time(place: Place, tmp_path: Path) -> None:
    running = [
        place.start(task, tmp_path, number=1, versions=VERSIONS) for task in ("publish", "collect", "collect")
    ]
    assert [process.wait(processes.PATIENCE_S) for process in running] == [0, 0, 0]
    check(place.store, tmp_path)


@pytest.mark.parametrize(
    ("place", "kills"),
    [
        pytest.param("file", KILLS, marks=pytest.mark.ci),
        pytest.param("s3", OVER_S3, marks=pytest.mark.ci),
        pytest.param("s3", KILLS, marks=pytest.mark.soak),
    ],
    indirect=["place"],
)
def test_whoever_is_killed_in_its_window_is_followed_up_by_the_next(
    place: Place, tmp_path: Path, kills: Sequence[tuple[str, str]]
) -> None:
    publish(place.store, epoch=1, versions=VERSIONS // 3, collecting=True)
    for number, (task, spec) in enumerate(kills):
        folder, epoch = tmp_path / str(number), 10 + 10 * number
        folder.mkdir()
        if task == "collect":  # something to collect
            publish(place.store, epoch=epoch, versions=len(read_log(place.store).records) + 9)
        versions = processes.MANY if task == "publish" else 0
        process = place.start(task, folder, number=epoch + 1, versions=versions, spec=spec)
        processes.require_killed(process, folder)
    publish(place.store, epoch=1000, versions=len(read_log(place.store).records) + 1, collecting=True)
    check(place.store, tmp_path)


def check(store: ObjectStore, folder: Path) -> None:
    """What is retained or pinned is whole and exact; nothing else is in the store."""
    newest = len(read_log(store).records) - 1
    publish(store, epoch=2000, versions=newest + 2, collecting=True)
    processes.collect(store, versions=0)
    log = read_log(store)
    kept = buildable(log)
    assert {processes.PINNED, newest, newest + 1} <= kept
    # How many stay depends on when snapshots were made beside the publishers.
    assert len(kept) < len(log.records), "nothing was collected"
    for version in kept:
        assert log.record(version).model_root == processes.root_of(version)
        assert verify_version(store, log, version=version, threads=2).faults == ()
    named = {part.key for record in log.records for _, parts in paths_of(record) for part in parts}
    assert {info.key for info in store.list(KEYS.parts)} == named
    assert list(store.list(KEYS.intents)) == []
    assert 1 <= len(list(store.list(KEYS.checkpoints))) <= 3
    mirror = Mirror(folder / "cold")
    mirror.advance(store, log, target=newest)
    assert same_model(mirror.load(), processes.model_of(newest))
