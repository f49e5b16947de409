"""A node's folder has one owner at a time, and every life of the node a higher incarnation."""

import os
from pathlib import Path

import pytest

from astraflow.errors import ConflictError
from astraflow_raas.node.folder import claim_folder


def one_life(folder: Path) -> int:
    """The incarnation of a node that comes and goes."""
    claimed = claim_folder(folder, node_id="node-1")
    claimed.release()
    return claimed.incarnation


def test_each_life_has_a_higher_incarnation(tmp_path: Path) -> None:
    assert one_life(tmp_path) < one_life(tmp_path)


def test_a_clock_that_went_back_does_not_lower_the_incarnation(tmp_path: Path) -> None:
    one_life(tmp_path)
    (tmp_path / "node-1" / "incarnation").write_text("99999999999999 99999999999999\n")
    assert one_life(tmp_path) == 100_000_000_000_000


def test_a_name_in_use_is_refused(tmp_path: Path) -> None:
    first = claim_folder(tmp_path, node_id="node-1")
    with pytest.raises(ConflictError, match=f"in use by process {os.getpid()} .*choose another --node-id"):
        claim_folder(tmp_path, node_id="node-1")
    first.release()


def test_unnamed_nodes_of_one_host_get_different_names(tmp_path: Path) -> None:
    first, second = claim_folder(tmp_path, node_id=""), claim_folder(tmp_path, node_id="")
    assert first.node_id.endswith("-1")
    assert second.node_id.endswith("-2")
    first.release()
    assert claim_folder(tmp_path, node_id="").node_id == first.node_id
    second.release()


def test_mirrors_of_two_runs_never_share_a_folder(tmp_path: Path) -> None:
    folder = claim_folder(tmp_path, node_id="node-1")
    places = {folder.mirror(run, policy, root=None) for run in ("r1", "r2") for policy in ("a", "b")}
    assert len(places) == 4
    assert folder.mirror("r1", "a", root=Path("/dev/shm")) == Path("/dev/shm/node-1/r1/a")
    folder.release()


def test_what_a_killed_node_left_of_its_episodes_is_removed_by_its_next_start(tmp_path: Path) -> None:
    first = claim_folder(tmp_path, node_id="node-1")
    (first.scratch / "agent-1").mkdir()
    first.release()
    second = claim_folder(tmp_path, node_id="node-1")
    assert not list(second.scratch.iterdir())
    second.release()


@pytest.mark.parametrize(
    "damaged", [b"", b"17\x80", b"17x5\n", b"99999999999999 99999999", b"99999999999999 19999999999999\n"]
)
def test_a_damaged_incarnation_gives_way_to_the_time(tmp_path: Path, damaged: bytes) -> None:
    before = one_life(tmp_path)
    (tmp_path / "node-1" / "incarnation").write_bytes(damaged)
    assert before <= one_life(tmp_path) < 10_000_000_000_000
