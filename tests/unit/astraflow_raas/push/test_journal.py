"""The journal is whole lines, in two files of which the older one goes."""

import json
from pathlib import Path

import pytest

from astraflow.rollout.v1 import trajectory_pb2
from astraflow_raas.push.journal import PushJournal


def _tasks(*paths: Path) -> list[list[str]]:
    return [[json.loads(line)["task_id"] for line in path.read_text().splitlines()] for path in paths]


def test_the_newest_lines_are_kept_and_each_of_them_once(tmp_path: Path) -> None:
    path = tmp_path / "node" / "pushes.jsonl"
    journal = PushJournal(path, max_bytes=1)
    journal.sent(trajectory_pb2.Episode(task_id="task-0"))
    size = path.stat().st_size
    journal.close()
    journal = PushJournal(path, max_bytes=2 * size)
    for number in range(1, 5):
        journal.sent(trajectory_pb2.Episode(task_id=f"task-{number}"))
    journal.close()
    journal.sent(trajectory_pb2.Episode(task_id="after the end"))
    assert _tasks(path.with_name("pushes.1.jsonl"), path) == [["task-2", "task-3"], ["task-4"]]


def test_a_node_that_is_killed_between_two_files_goes_on_in_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "pushes.jsonl"
    journal = PushJournal(path, max_bytes=1)
    journal.sent(trajectory_pb2.Episode(task_id="task-0"))
    with monkeypatch.context() as patch:
        patch.setattr("astraflow_raas.push.journal._open", _killed)
        with pytest.raises(KeyboardInterrupt):
            journal.sent(trajectory_pb2.Episode(task_id="task-1"))
    journal = PushJournal(path, max_bytes=1)
    journal.sent(trajectory_pb2.Episode(task_id="task-1"))
    journal.close()
    assert _tasks(path.with_name("pushes.1.jsonl"), path) == [["task-0"], ["task-1"]]


def _killed(_: Path) -> int:
    raise KeyboardInterrupt
