"""Mirrors lie in shared memory where they fit, are found again, and do not pile up."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from astraflow_raas.node.folder import NodeFolder, claim_folder
from astraflow_raas.node.mirror_folders import MirrorFolders


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[NodeFolder]:
    claimed = claim_folder(tmp_path / "work", node_id="node-1")
    yield claimed
    claimed.release()


@pytest.fixture
def place(folder: NodeFolder, tmp_path: Path) -> MirrorFolders:
    """Its shared memory is a folder."""
    (tmp_path / "shm").mkdir()
    return MirrorFolders(folder, shared_memory=tmp_path / "shm")


def used(place: MirrorFolders, run: str, policy: str = "solver", *, model_bytes: int = 1000) -> Path:
    """A mirror that was chosen and written."""
    chosen = place.choose(run, policy, model_bytes=model_bytes)
    chosen.mkdir(parents=True, exist_ok=True)
    (chosen / "state.json").write_text("{}")
    return chosen


def make_old(folder: Path, *, days: int) -> None:
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (time.time() - days * 86_400,) * 2)


def test_a_mirror_that_fits_lies_in_shared_memory_and_the_next_life_finds_it(
    place: MirrorFolders, folder: NodeFolder, tmp_path: Path
) -> None:
    assert place.find("r1", "solver") is None
    chosen = used(place, "r1")
    assert chosen.is_relative_to(tmp_path / "shm")
    place.close()
    assert MirrorFolders(folder, shared_memory=tmp_path / "shm").find("r1", "solver") == chosen


def test_one_that_does_not_fit_lies_in_the_work_folder(place: MirrorFolders, folder: NodeFolder) -> None:
    huge = place.choose("r1", "solver", model_bytes=2**60)
    none = MirrorFolders(folder, shared_memory=folder.path / "none").choose("r1", "solver", model_bytes=1)
    assert huge == none == folder.path / "mirror" / "r1" / "solver"


def test_a_mirror_that_was_begun_in_the_work_folder_stays_there(place: MirrorFolders) -> None:
    own = used(place, "r1", model_bytes=2**60)
    assert place.choose("r1", "solver", model_bytes=1) == own


def test_a_folder_that_is_named_decides(tmp_path: Path, folder: NodeFolder) -> None:
    place = MirrorFolders(folder, root=tmp_path / "named", shared_memory=tmp_path / "shm")
    assert place.choose("r1", "solver", model_bytes=1) == tmp_path / "named" / "node-1" / "r1" / "solver"
    assert not (tmp_path / "shm").exists()


def test_at_the_end_of_the_run_nothing_stays_in_memory(place: MirrorFolders, tmp_path: Path) -> None:
    used(place, "r1")
    place.run_is_over = True
    place.close()
    assert not [path for path in (tmp_path / "shm").rglob("*") if path.is_file()]


def test_mirrors_of_this_nodes_other_runs_are_removed(place: MirrorFolders) -> None:
    before, now = used(place, "r1"), used(place, "r2")
    place.remove_stale("r2")
    assert (before.exists(), now.exists()) == (False, True)


def test_mirrors_of_a_node_whose_folder_is_gone_are_removed(place: MirrorFolders, tmp_path: Path) -> None:
    gone = claim_folder(tmp_path / "other", node_id="node-1")
    left = used(MirrorFolders(gone, shared_memory=tmp_path / "shm"), "r1")
    gone.release()
    place.remove_stale("r1")
    assert left.exists()
    gone.path.rename(tmp_path / "elsewhere")
    place.remove_stale("r1")
    assert not left.exists()


def test_mirrors_of_a_node_that_stopped_a_day_ago_are_removed(place: MirrorFolders, tmp_path: Path) -> None:
    other = claim_folder(tmp_path / "other", node_id="node-2")
    left = used(MirrorFolders(other, shared_memory=tmp_path / "shm"), "r1")
    make_old(tmp_path / "shm", days=2)
    place.remove_stale("r1")
    assert left.exists(), "it runs"
    other.release()
    place.remove_stale("r1")
    assert not left.exists()
