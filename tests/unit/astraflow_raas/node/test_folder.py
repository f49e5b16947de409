"""A node's folder has one owner at a time, and keeps the credential by which the next one continues its session."""

import os
from pathlib import Path

import pytest

from astraflow.errors import ConflictError
from astraflow_raas.node.folder import claim_folder


def test_the_next_process_finds_the_credential_of_each_run_and_nobody_else_may_read_it(
    tmp_path: Path,
) -> None:
    first = claim_folder(tmp_path, node_id="node-1")
    assert first.kept_session("r1") == ""
    for run_id, credential in (("r1", "old"), ("r1", "new"), ("r2", "other")):
        first.keep_session(run_id, credential)
    first.release()
    second = claim_folder(tmp_path, node_id="node-1")
    assert [second.kept_session(run_id) for run_id in ("r1", "r2")] == ["new", "other"]
    kept = list((second.path / "sessions").iterdir())
    assert {path.stat().st_mode & 0o777 for path in kept} == {0o600}
    assert len(kept) == 2, "no draft is left"
    second.release()


def test_a_draft_that_a_killed_process_left_is_in_nobodys_way(tmp_path: Path) -> None:
    folder = claim_folder(tmp_path, node_id="node-1")
    folder.keep_session("r1", "old")
    (folder.path / "sessions" / "r1.draft").write_text("half")
    folder.keep_session("r1", "new")
    assert folder.kept_session("r1") == "new"
    folder.release()


def test_a_damaged_credential_is_none(tmp_path: Path) -> None:
    folder = claim_folder(tmp_path, node_id="node-1")
    folder.keep_session("r1", "good")
    (folder.path / "sessions" / "r1").write_bytes(b"\xff\xfe")
    assert folder.kept_session("r1") == ""
    folder.release()


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


@pytest.mark.parametrize(
    ("granted", "name"),
    [
        (("*",), "node-1"),
        (("node-*",), "node-1"),
        (("no*",), "node-1"),
        (("raas", "raas-*"), "raas-node-1"),
        (("eu-7",), "eu-7"),
    ],
)
def test_an_unnamed_node_is_called_by_its_host_and_what_its_token_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, granted: tuple[str, ...], name: str
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node")
    folder = claim_folder(tmp_path, node_id="", granted=granted)
    folder.release()
    assert folder.node_id == name


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
