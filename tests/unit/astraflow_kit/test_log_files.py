"""A log is bounded while it is written, by whoever has it open; nothing is lost when the one who rotates is killed."""

import asyncio
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from astraflow_kit.log_files import KEPT, drop_cut_line, end_of, ended_with_bounded_log, older, rotate


class Killed(BaseException):
    """In place of a SIGKILL."""


def _parts(log: Path) -> list[Path]:
    """The files of a log, oldest first."""
    return [path for number in range(KEPT + 1, 0, -1) if (path := older(log, number)).exists()] + [log]


def _lines(log: Path) -> list[str]:
    return [line for part in _parts(log) for line in part.read_text().splitlines()]


def _append(log: Path, *lines: str) -> None:
    with log.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def test_a_log_is_moved_once_it_has_reached_the_size_and_the_oldest_goes(tmp_path: Path) -> None:
    log = tmp_path / "node-1.log"
    assert not rotate(log, max_bytes=1)
    for number in range(6):
        _append(log, f"line {number}")
        assert not rotate(log, max_bytes=8)
        assert rotate(log, max_bytes=7)
    assert [part.name for part in _parts(log)] == [
        "node-1.3.log",
        "node-1.2.log",
        "node-1.1.log",
        "node-1.log",
    ]
    assert _lines(log) == ["line 3", "line 4", "line 5"]


def test_who_has_the_log_open_goes_on_in_the_same_file(tmp_path: Path) -> None:
    log = tmp_path / "node-1.log"
    with log.open("a", buffering=1) as of_a_grandchild:
        of_a_grandchild.write("before\n")
        rotate(log, max_bytes=1)
        of_a_grandchild.write("after\n")
    assert (older(log, 1).read_text(), log.read_text()) == ("before\n", "after\n")


def test_the_end_of_a_log_is_whole_also_right_after_it_was_rotated(tmp_path: Path) -> None:
    log = tmp_path / "node-1.log"
    assert end_of(log, num_bytes=99) == ""
    _append(log, "why it ended")
    assert end_of(log, num_bytes=6) == "ended\n"
    rotate(log, max_bytes=1)
    _append(log, "exit")
    assert end_of(log, num_bytes=99) == "why it ended\nexit\n"
    assert end_of(log, num_bytes=11) == "ended\nexit\n"


POINTS = [(shutil, "copyfileobj", 2), (Path, "replace", 3), (os, "ftruncate", 1)]


@pytest.mark.parametrize(
    ("owner", "name", "nth", "before"),
    [
        pytest.param(owner, name, nth, before, id=f"{name} {nth} {'before' if before else 'after'}")
        for owner, name, last in POINTS
        for nth in range(1, last + 1)
        for before in (True, False)
    ],
)
def test_a_kill_at_any_point_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, nth: int, before: bool
) -> None:
    log = tmp_path / "node-1.log"
    for number in range(3):
        _append(log, f"line {number}")
        rotate(log, max_bytes=1)
    _append(log, "line 3")
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, _killed_at(getattr(owner, name), nth, before=before))
        with pytest.raises(Killed):
            rotate(log, max_bytes=1)
    # The oldest file is the one that goes.
    assert set(_lines(log)) >= {"line 1", "line 2", "line 3"}
    _append(log, "line 4")
    rotate(log, max_bytes=1)
    assert _lines(log)[-1] == "line 4"
    assert set(_lines(log)) >= {"line 3", "line 4"}


def _killed_at(call: Callable[..., Any], nth: int, *, before: bool) -> Callable[..., Any]:
    calls = 0

    def killed(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth and before:
            raise Killed
        answer = call(*arguments, **named)
        if calls == nth:
            raise Killed
        return answer

    return killed


async def test_the_log_of_a_process_is_bounded_while_it_writes_and_keeps_what_it_said_at_its_end(
    tmp_path: Path,
) -> None:
    log = tmp_path / "child.log"
    code = f"""
import pathlib, time
while not pathlib.Path({str(older(log, KEPT))!r}).exists():
    print("again and again", flush=True)
    time.sleep(0.001)
print("the end")
raise SystemExit(3)
"""
    with log.open("ab") as output:
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=output)
    try:
        assert await ended_with_bounded_log(child, log, max_bytes=100, look_s=0.01) == 3
    finally:
        if child.returncode is None:
            child.kill()
    assert end_of(log, num_bytes=8) == "the end\n"
    assert not older(log, KEPT + 1).exists()


@pytest.mark.parametrize("cut", [b"", b"c", b"c" * 200_000])
@pytest.mark.parametrize("whole", [b"", b"a\nb\n"])
def test_a_last_line_that_was_cut_short_goes_however_long(tmp_path: Path, whole: bytes, cut: bytes) -> None:
    path = tmp_path / "lines"
    path.write_bytes(whole + cut)
    assert drop_cut_line(path) == len(cut)
    assert path.read_bytes() == whole


def test_a_file_that_is_not_there_has_no_line_to_drop(tmp_path: Path) -> None:
    assert drop_cut_line(tmp_path / "lines") == 0
