"""Rows of files: packed or not, under one name, and wrong ones by file and line."""

import gzip
from pathlib import Path

import pytest

from astraflow.data.task_files import RowTasks, read_rows
from astraflow.errors import RecipeError
from astraflow.plugins import TaskSpec

FIELDS = {"prompt|text": str, "task_id": int}
TESTED = FIELDS | {"tests": list}


class Numbers(RowTasks[int]):
    def task(self, task_id: str, row: int) -> TaskSpec:
        return TaskSpec(task_id, (), {"row": row})


def test_a_file_may_be_packed_and_call_a_field_by_another_name(tmp_path: Path) -> None:
    (tmp_path / "plain.jsonl").write_text('{"prompt": "a", "task_id": 1}\n\n')
    with gzip.open(tmp_path / "packed.jsonl.gz", "wt") as file:
        file.write('{"text": "a", "task_id": 1, "more": []}')
    for name in ("plain.jsonl", "packed.jsonl", "packed.jsonl.gz"):
        (row,) = read_rows(tmp_path / name, fields=FIELDS, remedy="")
        assert (row["prompt"], row["task_id"]) == ("a", 1)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            '{"prompt": "a", "task_id": 1, "tests": []}',
            r"rows.jsonl:2: 'tests' is \[\]; give a list with an item",
        ),
        ("{", r"rows.jsonl:2: not JSON \(.*\); a row is one JSON object on one line"),
        ("[]", "rows.jsonl:2: a list; a row is one JSON object"),
        ("{}", r"rows.jsonl:2: no 'prompt\|text'; the row has nothing"),
        ('{"prompt": "a", "task_id": "1"}', "rows.jsonl:2: 'task_id' is '1'; give a int"),
    ],
)
def test_a_malformed_row_is_named_with_file_and_line(line: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(f'{{"prompt": "a", "task_id": 1, "tests": ["b"]}}\n{line}\n')
    with pytest.raises(RecipeError, match=words):
        read_rows(tmp_path / "rows.jsonl", fields=TESTED, remedy="")


def test_a_missing_an_empty_and_a_damaged_file_name_what_brings_the_data(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "latin.jsonl").write_bytes('{"a": "é"}'.encode("latin-1"))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n' * 1000)[:-12])
    (tmp_path / "plain.jsonl.gz").write_bytes(b"{}")
    for name, words in (
        ("none.jsonl", "there is no file"),
        ("empty.jsonl", "has no rows"),
        ("latin.jsonl", r"latin.jsonl cannot be read \(UnicodeDecodeError"),
        ("cut.jsonl", r"cut.jsonl.gz cannot be read \(EOFError"),
        ("plain.jsonl.gz", r"plain.jsonl.gz cannot be read \(BadGzipFile"),
    ):
        with pytest.raises(RecipeError, match=f"{words}.*: git clone it"):
            read_rows(tmp_path / name, fields={}, remedy="git clone it")


def test_every_epoch_has_each_row_once_in_an_order_of_its_own() -> None:
    tasks = Numbers(train=range(50), heldout=(-1, -2), seed=1)
    drawn = [task.data["row"] for task in map(tasks.train, range(100)) if task is not None]
    assert sorted(drawn[:50]) == sorted(drawn[50:]) == list(range(50))
    assert drawn[:50] != drawn[50:]
    assert Numbers(train=range(50), heldout=(), seed=1).train(7) == tasks.train(7)
    assert [task.data["row"] if task else None for task in map(tasks.heldout, range(3))] == [-1, -2, None]
    assert Numbers(train=(), heldout=(1,), seed=1).train(0) is None


def test_a_row_is_known_again_in_another_epoch() -> None:
    tasks = Numbers(train=range(100, 120), heldout=(), seed=1)
    problems: dict[int, set[int]] = {}
    for task in map(tasks.train, range(60)):
        assert task is not None
        problems.setdefault(task.data["row"], set()).add(task.data["problem"])
    assert sorted(map(len, problems.values())) == [1] * 20
    assert len(set().union(*problems.values())) == 20
    assert (tasks.tasks_per_epoch, Numbers(train=(), heldout=(1,), seed=1).tasks_per_epoch) == (20, None)


def test_a_problem_that_a_data_set_names_keeps_its_name() -> None:
    class Named(Numbers):
        def task(self, task_id: str, row: int) -> TaskSpec:
            return TaskSpec(task_id, (), {"problem": f"p{row}"})

    task = Named(train=(7,), heldout=(), seed=1).train(0)
    assert task is not None
    assert task.data == {"problem": "p7"}
