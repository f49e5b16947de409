"""The support bundle packs evidence and leaves weights out, whatever is missing."""

import json
import os
from pathlib import Path

import pytest

from astraflow.client import Connection
from astraflow.weights.v1 import manifest_pb2
from astraflow_launcher.support.bundle import Evidence, save_bundle
from support.archives import content


def packed(folder: Path, **more: str) -> dict[str, bytes]:
    """What a bundle of a run folder holds."""
    path = folder.parent / "b.tar.gz"
    save_bundle(Evidence(folders=(folder,), **more), path)
    return content(path)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """What a run leaves, in small."""
    folder = tmp_path / "run"
    entry = manifest_pb2.Entry(manifest=manifest_pb2.Manifest(sequence=3)).SerializeToString()
    files = {
        "run.json": b'{"run_id": "r"}',
        "recipe.yaml": b"run: {name: r}\n",
        "logs/node-1.log": b'{"event": "x", "url": "redis://:hunter2@h:1"}\n',
        "redis/appendonlydir/appendonly.aof.1.incr.aof": b"*1\r\n\x00\xff",
        "store/r/solver/seq/00000000000000000003.pb": entry,
        "store/r/solver/parts/abc.afwd": b"weights",
        "work/node-1/mirror/r/model.safetensors": b"weights",
        "work/trainer-solver/ledger.jsonl": b'{"step": 1}\n',
        "work/trainer-solver/checkpoints/step-1/__0_0.distcp": b"weights",
        "cache/warm/config.json": b"{}",
    }
    for name, held in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(held)
    return folder


def test_evidence_is_packed_and_weights_are_not(run_folder: Path, tmp_path: Path) -> None:
    assert save_bundle(Evidence(folders=(run_folder,)), tmp_path / "b.tar.gz") == []
    found = packed(run_folder)
    for name in (
        *("run.json", "recipe.yaml", "logs/node-1.log", "work/trainer-solver/ledger.jsonl"),
        *("redis/appendonlydir/appendonly.aof.1.incr.aof", "store/r/solver/seq/00000000000000000003.pb"),
        *("versions.json", "environment.txt", "files.txt", "manifests.json", "README.txt"),
    ):
        assert name in found, name
    assert not [name for name, held in found.items() if held == b"weights"]
    assert b"hunter2" not in b"".join(found.values())
    assert b"parts/abc.afwd" in found["files.txt"]


def test_manifests_can_be_read_as_text(run_folder: Path) -> None:
    [(key, entry)] = json.loads(packed(run_folder)["manifests.json"]).items()
    assert key.endswith("seq/00000000000000000003.pb")
    assert entry["manifest"]["sequence"] == 3


def test_versions_of_everything_are_in_it(run_folder: Path) -> None:
    versions = json.loads(packed(run_folder)["versions.json"])
    assert versions["kernel"] == os.uname().release
    assert {"grpcio", "protobuf"} <= versions["packages"].keys()
    assert "v=" in versions["redis"]


def test_a_torn_manifest_is_said_in_its_place_and_nothing_else_is_lost(run_folder: Path) -> None:
    (run_folder / "store/r/solver/seq/00000000000000000004.pb").write_bytes(b"\xff\xff\xff")
    sound, torn = json.loads(packed(run_folder)["manifests.json"]).values()
    assert sound["manifest"]["sequence"] == 3
    assert torn["bytes"] == 3
    assert torn["damaged"]


def test_daemons_and_servers_that_ended_are_named_as_missing(run_folder: Path, tmp_path: Path) -> None:
    (run_folder / "addresses").mkdir()
    ended = {"pid": 2**22 + 1, "grpc": "127.0.0.1:1", "http": "127.0.0.1:1"}
    (run_folder / "addresses" / "dataflow.json").write_text(json.dumps(ended))
    evidence = Evidence(folders=(run_folder,), server=Connection("127.0.0.1:1"))
    missing = save_bundle(evidence, tmp_path / "b.tar.gz")
    assert "pages of dataflow: it has ended" in missing
    assert [gap for gap in missing if gap.startswith("status of 127.0.0.1:1: ")]


def test_hits_of_failpoints_are_in_it(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = run_folder.parent / "hits-elsewhere"
    elsewhere.write_text('{"name": "trainer.step_taken"}\n')
    monkeypatch.setenv("ASTRAFLOW_FAILPOINTS_LOG", str(elsewhere))
    monkeypatch.setenv("ASTRAFLOW_TOKEN", "hunter2")
    found = packed(run_folder)
    assert b"trainer.step_taken" in found["hits"]
    assert b"ASTRAFLOW_TOKEN=***" in found["environment.txt"]
