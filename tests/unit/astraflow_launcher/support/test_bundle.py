"""The support bundle packs evidence and leaves weights out, whatever is missing."""

import json
import os
import tarfile
from pathlib import Path

import pytest

from astraflow.weights.v1 import manifest_pb2
from astraflow_launcher.support.bundle import Evidence, save_bundle


def read(path: Path) -> dict[str, bytes]:
    """Entry name without the leading folder -> bytes."""
    with tarfile.open(path) as tar:
        return {
            member.name.partition("/")[2]: tar.extractfile(member).read()  # type: ignore[union-attr]
            for member in tar
        }


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
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def test_evidence_is_packed_and_weights_are_not(run_folder: Path, tmp_path: Path) -> None:
    assert save_bundle(Evidence(folders=(run_folder,)), tmp_path / "b.tar.gz") == []
    packed = read(tmp_path / "b.tar.gz")
    for name in (
        *("run.json", "recipe.yaml", "logs/node-1.log", "work/trainer-solver/ledger.jsonl"),
        *("redis/appendonlydir/appendonly.aof.1.incr.aof", "store/r/solver/seq/00000000000000000003.pb"),
        *("versions.json", "environment.txt", "files.txt", "manifests.json", "README.txt"),
    ):
        assert name in packed, name
    assert not [name for name, content in packed.items() if content == b"weights"]
    assert b"hunter2" not in b"".join(packed.values())
    assert b"parts/abc.afwd" in packed["files.txt"]


def test_manifests_can_be_read_as_text(run_folder: Path, tmp_path: Path) -> None:
    save_bundle(Evidence(folders=(run_folder,)), tmp_path / "b.tar.gz")
    [(key, entry)] = json.loads(read(tmp_path / "b.tar.gz")["manifests.json"]).items()
    assert key.endswith("seq/00000000000000000003.pb")
    assert entry["manifest"]["sequence"] == 3


def test_versions_of_everything_are_in_it(run_folder: Path, tmp_path: Path) -> None:
    save_bundle(Evidence(folders=(run_folder,)), tmp_path / "b.tar.gz")
    versions = json.loads(read(tmp_path / "b.tar.gz")["versions.json"])
    assert versions["kernel"] == os.uname().release
    assert {"grpcio", "protobuf"} <= versions["packages"].keys()
    assert "v=" in versions["redis"]


def test_a_torn_manifest_is_said_in_its_place_and_nothing_else_is_lost(
    run_folder: Path, tmp_path: Path
) -> None:
    (run_folder / "store/r/solver/seq/00000000000000000004.pb").write_bytes(b"\xff\xff\xff")
    save_bundle(Evidence(folders=(run_folder,)), tmp_path / "b.tar.gz")
    sound, torn = json.loads(read(tmp_path / "b.tar.gz")["manifests.json"]).values()
    assert sound["manifest"]["sequence"] == 3
    assert torn["bytes"] == 3
    assert torn["damaged"]


def test_daemons_and_servers_that_ended_are_named_as_missing(run_folder: Path, tmp_path: Path) -> None:
    (run_folder / "addresses").mkdir()
    (run_folder / "addresses" / "dataflow.json").write_text(
        json.dumps({"pid": 2**22 + 1, "grpc": "127.0.0.1:1", "http": "127.0.0.1:1"})
    )
    evidence = Evidence(folders=(run_folder,), address="127.0.0.1:1")
    missing = save_bundle(evidence, tmp_path / "b.tar.gz")
    assert "pages of dataflow: it has ended" in missing
    assert [gap for gap in missing if gap.startswith("status of 127.0.0.1:1: ")]


def test_hits_of_failpoints_are_in_it(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hits-elsewhere").write_text('{"name": "trainer.step_taken"}\n')
    monkeypatch.setenv("ASTRAFLOW_FAILPOINTS_LOG", str(tmp_path / "hits-elsewhere"))
    monkeypatch.setenv("ASTRAFLOW_TOKEN", "hunter2")
    save_bundle(Evidence(folders=(run_folder,)), tmp_path / "b.tar.gz")
    packed = read(tmp_path / "b.tar.gz")
    assert b"trainer.step_taken" in packed["hits"]
    assert b"ASTRAFLOW_TOKEN=***" in packed["environment.txt"]
