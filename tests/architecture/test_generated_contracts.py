"""The committed contracts, descriptors and docs/contracts.md are what proto/ makes; the check can fail."""

import subprocess
import sys
from pathlib import Path

import pytest

from support.source_tree import CLIENT_ROOT, REPOSITORY

GENERATOR = REPOSITORY / "proto" / "generate.py"


def generate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(GENERATOR), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    assert generate(*into(folder)).returncode == 0
    return folder


def into(folder: Path) -> list[str]:
    """The options that keep a run within `folder`."""
    single = ["--page", str(folder / "contracts.md"), "--descriptors", str(folder / "all.binpb")]
    single += ["--typescript", str(folder / "typescript"), "--go", str(folder / "go")]
    return ["--into", str(folder), *single]


def test_the_committed_contracts_are_fresh() -> None:
    finished = generate("--check")
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_an_edited_and_an_orphaned_file_are_named(generated: Path) -> None:
    edited = min(generated.rglob("*_pb2.py"))
    orphan = edited.with_name("gone_pb2.py")
    orphan.touch()
    stale = [edited, orphan, generated / "contracts.md", generated / "all.binpb"]
    for path in stale:
        path.write_bytes(path.read_bytes() + b"# by hand\n")
    finished = generate("--check", *into(generated))
    assert finished.returncode == 1
    assert [path.name for path in stale if path.name not in finished.stdout] == []


def test_only_versioned_packages_hold_generated_code() -> None:
    generated = [path for path in CLIENT_ROOT.rglob("*_pb2*.py*") if path.suffix in (".py", ".pyi")]
    assert [str(path) for path in generated if path.parent.name != "v1"] == []


def test_the_typescript_client_exports_every_contract_of_the_dataflow_server() -> None:
    source = REPOSITORY / "clients" / "typescript" / "src"
    exports = (source / "dataflow.ts").read_text()
    contracts = sorted((source / "gen/astraflow/dataflow/v1").glob("*_pb.ts"))
    assert contracts
    assert [path.stem for path in contracts if f"/{path.stem}.js" not in exports] == []
