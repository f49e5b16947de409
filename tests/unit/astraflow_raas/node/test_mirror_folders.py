"""Mirrors lie in shared memory where they fit, are found again, and do not pile up."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from astraflow_raas.node.folder import NodeFolder, claim_folder
from astraflow_raas.node.mirror_folders import MirrorFolders


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """Stands where /dev/shm is."""
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[NodeFolder]:
    claimed = claim_folder(tmp_path / "work", node_id="node-1")
    yield claimed
    claimed.release()


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
    memory: Path, folder: NodeFolder
) -> None:
    place = MirrorFolders(folder, shared_memory=memory)
    assert place.find("r1", "solver") is None
    chosen = used(place, "r1")
    assert chosen.is_relative_to(memory)
    place.close()
    assert MirrorFolders(folder, shared_memory=memory).find("r1", "solver") == chosen


def test_one_that_does_not_fit_and_one_without_shared_memory_lie_in_the_work_folder(
    memory: Path, folder: NodeFolder
) -> None:
    huge = MirrorFolders(folder, shared_memory=memory).choose("r1", "solver", model_bytes=2**60)
    none = MirrorFolders(folder, shared_memory=memory / "none").choose("r1", "solver", model_bytes=1)
    assert huge == none == folder.path / "mirror" / "r1" / "solver"


def test_a_mirror_that_was_begun_in_the_work_folder_stays_there(memory: Path, folder: NodeFolder) -> None:
    own = used(MirrorFolders(folder, shared_memory=memory), "r1", model_bytes=2**60)
    assert MirrorFolders(folder, shared_memory=memory).choose("r1", "solver", model_bytes=1) == own


def test_a_folder_that_is_named_decides(memory: Path, tmp_path: Path, folder: NodeFolder) -> None:
    place = MirrorFolders(folder, root=tmp_path / "named", shared_memory=memory)
    assert place.choose("r1", "solver", model_bytes=1) == tmp_path / "named" / "node-1" / "r1" / "solver"
    assert not list(memory.iterdir())


def test_at_the_end_of_the_run_nothing_stays_in_memory(memory: Path, folder: NodeFolder) -> None:
    place = MirrorFolders(folder, shared_memory=memory)
    used(place, "r1")
    place.run_is_over = True
    place.close()
    assert not [path for path in memory.rglob("*") if path.is_file()]


def test_mirrors_of_this_nodes_other_runs_are_removed(memory: Path, folder: NodeFolder) -> None:
    place = MirrorFolders(folder, shared_memory=memory)
    before, now = used(place, "r1"), used(place, "r2")
    place.remove_stale("r2")
    assert (before.exists(), now.exists()) == (False, True)


def test_mirrors_of_a_node_whose_folder_is_gone_are_removed_at_once(
    memory: Path, tmp_path: Path, folder: NodeFolder
) -> None:
    gone = claim_folder(tmp_path / "other", node_id="node-1")
    left = used(MirrorFolders(gone, shared_memory=memory), "r1")
    gone.release()
    MirrorFolders(folder, shared_memory=memory).remove_stale("r1")
    assert left.exists()
    gone.path.rename(tmp_path / "elsewhere")
    MirrorFolders(folder, shared_memory=memory).remove_stale("r1")
    assert not left.exists()


@pytest.mark.parametrize(("runs", "stays"), [(True, True), (False, False)])
def test_mirrors_of_a_node_that_has_not_run_for_a_day_are_removed(
    memory: Path, tmp_path: Path, folder: NodeFolder, *, runs: bool, stays: bool
) -> None:
    other = claim_folder(tmp_path / "other", node_id="node-2")
    left = used(MirrorFolders(other, shared_memory=memory), "r1")
    make_old(memory, days=2)
    if not runs:
        other.release()
    MirrorFolders(folder, shared_memory=memory).remove_stale("r1")
    assert left.exists() == stays
    if runs:
        other.release()
