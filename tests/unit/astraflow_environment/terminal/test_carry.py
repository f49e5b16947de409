"""The work folder arrives as it was, and nothing of a hostile one leads anywhere else."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from astraflow_environment.terminal.carry import packed, unpack

SYSTEM = ("/usr", "/bin")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


@pytest.fixture
def anew(tmp_path: Path) -> Path:
    (tmp_path / "anew").mkdir()
    return tmp_path / "anew"


def carried(work: Path, anew: Path) -> set[str]:
    unpack(anew, packed(work), system=SYSTEM)
    return {str(path.relative_to(anew)) for path in anew.rglob("*")}


def test_files_folders_and_permissions_arrive(work: Path, anew: Path) -> None:
    (work / "d" / "e").mkdir(parents=True)
    (work / "d" / "big").write_bytes(os.urandom(200_000))
    (work / "run.sh").write_text("true\n")
    (work / "empty").touch()
    for name, mode in (("run.sh", 0o6755), ("empty", 0o000), ("d", 0o1555)):
        (work / name).chmod(mode)
    assert carried(work, anew) == {"d", "d/e", "d/big", "run.sh", "empty"}
    assert (anew / "d" / "big").read_bytes() == (work / "d" / "big").read_bytes()
    assert [(anew / name).stat().st_mode & 0o7777 for name in ("run.sh", "empty", "d")] == [0o755, 0, 0o555]


@pytest.mark.parametrize(
    ("target", "arrives"),
    [
        ("file", True),
        ("./d/../file", True),
        ("missing", True),
        ("/usr/bin/env", True),
        ("{anew}/file", True),
        ("..", False),
        ("../expected", False),
        ("/", False),
        ("/tests/expected", False),
        ("/proc/self/cwd/file", False),
        ("/proc/self/root/usr/bin/env", False),
        ("/dev/stdin", False),
        ("/usr/../tests/expected", False),
        ("/usr/bin/../../tests", False),
        ("out", False),  # itself
        ("other/expected", False),  # by another link
        ("missing/../../expected", False),
    ],
)
def test_a_link_arrives_when_it_stays(target: str, arrives: bool, work: Path, anew: Path) -> None:
    (work / "file").touch()
    (work / "d").mkdir()
    (work / "other").symlink_to("..")
    (work / "out").symlink_to(target.replace("{anew}", str(anew)))
    assert ("out" in carried(work, anew)) == arrives


def test_what_is_no_file_stays_behind(work: Path, anew: Path) -> None:
    os.mkfifo(work / "pipe")
    (work / "file").touch()
    assert carried(work, anew) == {"file"}


def entry(path: str, kind: str = "file", **about: object) -> bytes:
    return json.dumps({"path": path, "kind": kind, "bits": 0o644, "size": 0, **about}).encode()


@pytest.mark.parametrize(
    "frames",
    [
        [entry("../x")],
        [entry("/x")],
        [entry("")],
        [entry("d/../../x")],
        [entry("a", "link", target=".."), entry("a/x", "link", target="y")],
        [entry("a"), entry("a")],
        [entry("a", size=5), b"abc"],
        [entry("a", size=5), b"abcdefgh"],
        [b"[]"],
        [b"{}"],
        [b"\xff"],
        [entry("a", bits="x")],
    ],
)
def test_a_sender_that_lies_makes_nothing_outside(frames: list[bytes], anew: Path) -> None:
    def sent() -> Iterator[bytes]:
        yield from frames

    with pytest.raises((OSError, ValueError, KeyError, TypeError)):
        unpack(anew, sent(), system=SYSTEM)
    assert [path.name for path in anew.parent.iterdir()] == ["anew"]
