"""The support bundle asks a living server, and an object store elsewhere, for what no folder has."""

import asyncio
import json
from pathlib import Path

import pytest

from astraflow.dataflow.v1 import run_pb2, run_service_pb2
from astraflow.weights.v1 import manifest_pb2
from astraflow_launcher.support.bundle import Evidence, save_bundle
from astraflow_weights.store import open_store
from support.archives import content
from support.dataflow_world import World, recipe_text
from support.s3_server import S3Server

pytestmark = pytest.mark.integration


async def test_answers_of_the_server_and_manifests_of_its_store_are_packed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with S3Server(tmp_path) as s3:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        uri = f"s3://{s3.create_bucket('weights')}/prefix"
        entry = manifest_pb2.Entry(manifest=manifest_pb2.Manifest(version=7)).SerializeToString()
        store = open_store(uri, settings=s3.settings())
        store.put_if_absent("run/solver/seq/00000000000000000007.pb", entry)
        store.put_if_absent("run/solver/parts/abc.afwd", b"weights")
        run = run_pb2.Run(run_id="run", recipe_yaml=recipe_text(), store_uri=uri)
        await world.client.call(world.client.runs.CreateRun, run_service_pb2.CreateRunRequest(run=run))

        missing = await asyncio.to_thread(
            save_bundle, Evidence(address=world.address, run_id="run"), tmp_path / "b.tar.gz"
        )

    packed = {name: held.decode() for name, held in content(tmp_path / "b.tar.gz").items()}
    assert missing == []
    assert json.loads(packed["server/status.json"])["state"] == "active"
    assert "no_node" in packed["server/why.json"]
    assert json.loads(packed["server/run.json"])["run"]["store_uri"] == uri
    [manifest] = json.loads(packed["store/manifests.json"]).values()
    assert manifest["manifest"]["version"] == 7
    assert "parts/abc.afwd" in packed["store/objects.txt"]
    assert "weights" not in packed["store/manifests.json"]
