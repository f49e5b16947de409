"""The same loop over `s3://`: versions are published to and pulled from a bucket, and nothing else changes."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.store import ObjectStore
from astraflow_weights.versions.log import VersionLog
from support.development import RUN_ID, RunFiles, dev, finish
from support.published_models import read_log
from support.s3_server import S3Server

# In ci the runs of tests/deploy/test_compose.py and of test_two_regions.py have their weights in a bucket.
pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(240)]

URI = "s3://weights/some/prefix"
STEPS = 3


@pytest.fixture
def s3_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """moto with an empty bucket; daemons started from here find it."""
    with S3Server(tmp_path) as server:
        server.create_bucket("weights")
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


def test_a_run_learns_from_and_publishes_to_a_bucket(s3_server: S3Server, tmp_path: Path) -> None:
    with dev(tmp_path, "--steps", f"{STEPS}", "--store", URI) as launcher:
        summary = finish(launcher, tmp_path)
    assert (summary["steps"], summary["conservation_error"]) == (STEPS, 0)
    store = s3_server.store("weights/some/prefix")
    log = read_log(store, run_id=RUN_ID)
    newest = len(log.records) - 1
    trained = [line for line in RunFiles(tmp_path).read_metrics("step") if not line["skipped"]]
    assert newest == len(trained) >= 1
    assert not list((tmp_path / "run" / "store").rglob("*.pb"))
    assert_node_holds(tmp_path, store, log, version=newest)


def assert_node_holds(folder: Path, store: ObjectStore, log: VersionLog, *, version: int) -> None:
    """The node's mirror is the published version, bit by bit; the bucket gives the same to anybody."""
    state = next((folder / "run" / "work" / "node-1").rglob("state.json"))
    named = json.loads(state.read_text())["held"]
    sha256 = log.record(version).manifest_sha256.hex()
    assert (named["version"], named["manifest_sha256"]) == (version, sha256)
    mirror = Mirror(folder / "mirror")
    mirror.advance(store, log, target=version)
    assert mirror.directory is not None
    held, given = (folder / "model.safetensors" for folder in (state.parent / "checkpoint", mirror.directory))
    assert held.read_bytes() == given.read_bytes()
