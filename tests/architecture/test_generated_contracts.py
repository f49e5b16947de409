"""The committed Python contracts, descriptors and docs/contracts.md are what proto/ makes; the check can fail."""

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
    return ["--into", str(folder), *single]


def test_the_committed_contracts_are_fresh() -> None:
    finished = generate("--check")
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_an_edited_and_an_orphaned_file_are_named(generated: Path) -> None:
    edited = next(path for path in sorted(generated.rglob("*_pb2.py")))
    edited.write_text(edited.read_text() + "# by hand\n")
    orphan = edited.with_name("gone_pb2.py")
    orphan.write_text("")
    page = generated / "contracts.md"
    page.write_text(page.read_text() + "by hand\n")
    descriptors = generated / "all.binpb"
    descriptors.write_bytes(descriptors.read_bytes()[:-1])
    finished = generate("--check", *into(generated))
    assert finished.returncode == 1
    for stale in (edited, orphan, page, descriptors):
        assert stale.name in finished.stdout


def test_only_versioned_packages_hold_generated_code() -> None:
    strays = [
        str(path.relative_to(CLIENT_ROOT))
        for path in CLIENT_ROOT.rglob("*_pb2*.py*")
        if path.suffix in (".py", ".pyi") and path.parent.name != "v1"
    ]
    assert not strays
