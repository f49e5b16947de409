"""The support bundle asks a living server, and an object store elsewhere, for what no folder has."""

import asyncio
import json
from pathlib import Path

import pytest

from astraflow.client import Connection
from astraflow.weights.v1 import manifest_pb2
from astraflow_launcher.support.bundle import Evidence, save_bundle
from support.archives import content
from support.dataflow_world import World
from support.s3_server import S3Server

pytestmark = pytest.mark.integration


async def test_answers_of_the_server_and_manifests_of_its_store_are_packed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with S3Server(tmp_path) as s3:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        store = s3.store(f"{s3.create_bucket('weights')}/prefix")
        entry = manifest_pb2.Entry(manifest=manifest_pb2.Manifest(version=7)).SerializeToString()
        store.put_if_absent("run/solver/seq/00000000000000000007.pb", entry)
        store.put_if_absent("run/solver/parts/abc.afwd", b"weights")
        await world.create_run(store_uri=store.uri)
        evidence = Evidence(server=Connection(world.address), run_id="run")
        missing = await asyncio.to_thread(save_bundle, evidence, tmp_path / "b.tar.gz")

    packed = {name: held.decode() for name, held in content(tmp_path / "b.tar.gz").items()}
    assert missing == []
    assert json.loads(packed["server/status.json"])["state"] == "active"
    assert "no_node" in packed["server/why.json"]
    assert json.loads(packed["server/run.json"])["run"]["store_uri"] == "s3://weights/prefix"
    [manifest] = json.loads(packed["store/manifests.json"]).values()
    assert manifest["manifest"]["version"] == 7
    assert "parts/abc.afwd" in packed["store/objects.txt"]
    assert "weights" not in packed["store/manifests.json"]
